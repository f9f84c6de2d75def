"""What is said of a measured case: a line of a table, and rows {case, metric, value, unit}."""

from plait.bench import row

COLUMNS = ("us", "TFLOP/s", "TB/s", "% ceiling")


def of_ceiling(result, top):
    """1: as fast as the ceilings of the run allow. None where they are not known."""
    floor = result.bytes / top["read"] * 1e6
    if not isinstance(top["gemm"], str):
        return max(floor, result.flops / top["gemm"] * 1e6) / result.us
    # Memory is the ceiling of a decode whatever the other is.
    return floor / result.us if max(result.case.q_len) == 1 else None


def beside(result, results):
    """FLOP/s over those of the case that it stands beside; None without one."""
    other = results.get(result.case.beside)
    if other is None or not other.us:
        return None
    return (result.flops / result.us) / (other.flops / other.us)


def beyond(result, results):
    """Of the group `graph`: us more than the case that it stands beside; None without one."""
    other = results.get(result.case.beside)
    if result.case.group != "graph" or other is None or not other.us:
        return None
    return result.us - other.us


def ceiling_rows(top):
    rows = [row("ceiling", "read of 2 GiB", top["read"] / 1e12, "TB/s")]
    if isinstance(top["gemm"], str):
        return rows + [row("ceiling", f"bf16 GEMM absent: {top['gemm']}", None, "")]
    return rows + [row("ceiling", "bf16 GEMM 8192^3", top["gemm"] / 1e12, "TFLOP/s")]


def rows(result, results, top):
    """As `--json` gives them; value null where there is none."""
    name, out = result.case.name, []
    if result.problem:
        out.append(row(name, result.problem, None, ""))
    if result.us is not None:
        out.append(row(name, "time", result.us, "us"))
        out.append(row(name, "work", result.flops / result.us / 1e6, "TFLOP/s"))
        out.append(row(name, "bandwidth", result.bytes / result.us / 1e6, "TB/s"))
        out.append(row(name, "modelled balance", result.balance, "busiest / mean"))
        out.append(row(name, f"kernel {result.kernel}", None, ""))
        out.append(row(name, "workspace", result.workspace_bytes / 2**20, "MiB"))
        share, ratio = of_ceiling(result, top), beside(result, results)
        more = beyond(result, results)
        if share is not None:
            out.append(row(name, "of ceiling", 100 * share, "%"))
        if more is not None:
            out.append(row(name, f"more than {result.case.beside}", more, "us"))
        if ratio is not None:
            out.append(row(name, f"FLOP/s beside {result.case.beside}", ratio, "x"))
    for peer, us in result.peers.items():
        if isinstance(us, str):
            out.append(row(name, f"{peer}: {us}", None, ""))
        else:
            out.append(row(name, peer, us, "us"))
            out.append(row(name, f"{peer} / ours", us / result.us, "x"))
    return out


def header():
    return f"{'case':24s}" + "".join(f"{column:>11s}" for column in COLUMNS)


def line(result, results, top):
    """One line, peers behind: their time, and in brackets how many times ours it is."""
    r = result
    text = f"{r.case.name:24s}"
    if r.us is not None:
        share, ratio, more = of_ceiling(r, top), beside(r, results), beyond(r, results)
        text += f"{r.us:11.2f}{r.flops / r.us / 1e6:11.0f}{r.bytes / r.us / 1e6:11.2f}"
        text += " " * 11 if share is None else f"{100 * share:11.1f}"
        if more is not None:
            text += f"  {more:+.2f} us on {r.case.beside}"
        elif ratio is not None:
            text += f"  {ratio:.3f} x {r.case.beside}"
    for peer, us in r.peers.items():
        if not isinstance(us, str):
            text += f"  {peer} {us:.2f} ({us / r.us:.3f})"
    if r.us is not None:
        text += f"  [{r.kernel}]"
    if r.problem:
        text += f"  {'WRONG: ' if r.us is not None else ''}{r.problem}"
    failed = [f"{p} {us}" for p, us in r.peers.items() if isinstance(us, str) and _is_news(us)]
    return "\n".join([text] + [" " * 26 + why for why in failed])


def _is_news(why):
    """Whether a peer should have had a time: a case that it does not take is said in --json
    alone."""
    return why.startswith(("failed", "left out", "its output"))

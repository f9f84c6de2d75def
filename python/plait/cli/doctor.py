"""`plait doctor`: what this machine has of what plait can use, and what to do about the rest."""

import importlib.util
import os
import platform
from typing import Annotated

import typer

from plait import _plait
from plait.cli.tables import print_json, print_table
from plait.nvrtc import use_wheels


def _cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            fields = dict(
                line.split(":", 1)
                for line in file.read().split("\n\n")[0].splitlines()
                if ":" in line
            )
        fields = {key.strip(): value.strip() for key, value in fields.items()}
    except OSError:
        return platform.processor() or platform.machine(), []
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    flags = fields.get("flags", "").split()
    return fields.get("model name", platform.machine()), [f for f in wanted if f in flags]


def findings():
    """A list of {what, found, detail, advice}; advice is empty where nothing is missing."""
    name, flags = _cpu_name()
    cores = len(os.sched_getaffinity(0))
    rows = [
        dict(
            what="CPU",
            found=True,
            advice="",
            detail=f"{name}, {cores} cores for this process, {' '.join(flags) or 'no AVX2'}",
        )
    ]
    driver = _plait.driver_info()
    rows.append(
        dict(
            what="CUDA driver",
            found=driver.found,
            detail=f"takes CUDA {driver.major}.{driver.minor}" if driver.found else driver.why_not,
            advice="" if driver.found else "device='cpu' works; for a GPU install NVIDIA's driver",
        )
    )
    for index, gpu in enumerate(driver.gpus):
        rows.append(
            dict(
                what=f"GPU cuda:{index}",
                found=True,
                advice="",
                detail=f"{gpu.name}, sm_{gpu.arch}, {gpu.num_multiprocessors} multiprocessors, "
                f"{gpu.memory_bytes / 2**30:.0f} GiB",
            )
        )
    if driver.found and not driver.gpus:
        rows.append(
            dict(
                what="GPU",
                found=False,
                detail="the driver sees none",
                advice="check CUDA_VISIBLE_DEVICES",
            )
        )
    nvrtc = _plait.nvrtc_info()
    if nvrtc.found:
        advice = (
            f"newer than the driver, whose CUDA is {driver.major}.{driver.minor}: pip install "
            f"'plait[cuda{driver.major}]'"
            if nvrtc.newer_than_driver
            else ""
        )
        detail = f"{nvrtc.major}.{nvrtc.minor}, {nvrtc.path}"
    else:
        advice = "pip install 'plait[cuda13]', or set PLAIT_NVRTC to a libnvrtc.so"
        detail = "; ".join(nvrtc.looked_in)
    rows.append(dict(what="NVRTC", found=nvrtc.found, detail=detail, advice=advice))
    compiler = _plait.host_compiler_info()
    rows.append(
        dict(
            what="host compiler",
            found=compiler.found,
            detail=f"{compiler.command}: {compiler.version}"
            if compiler.found
            else "tried " + ", ".join(compiler.looked_for),
            advice=""
            if compiler.found
            else "only custom variants on the CPU need it: install g++ "
            "or clang++, or set PLAIT_CXX",
        )
    )
    folder = _plait.cache_dir()
    rows.append(
        dict(
            what="cache",
            found=bool(folder),
            detail=folder or _plait.cache_dir_reason(),
            advice=""
            if folder
            else "kernels are compiled anew in every process; set "
            "PLAIT_CACHE_DIR to a folder that can be written",
        )
    )
    torch = importlib.util.find_spec("torch") is not None
    rows.append(
        dict(
            what="torch",
            found=torch,
            detail="installed" if torch else "not installed",
            advice="" if torch else "optional",
        )
    )
    return rows


def doctor_command(
    json: Annotated[bool, typer.Option("--json", help="objects instead of a table")] = False,
):
    """Say what was found where, and what to do about each thing that is missing."""
    use_wheels()
    rows = findings()
    environment = [
        dict(name=v.name, value=v.value, meaning=v.meaning, fallback=v.fallback)
        for v in _plait.environment_variables()
    ]
    if json:
        print_json(dict(findings=rows, environment=environment))
        return
    print_table(
        ["", "what", "found", "to do"],
        [
            (
                "ok" if row["found"] and not row["advice"] else "--",
                row["what"],
                row["detail"],
                row["advice"],
            )
            for row in rows
        ],
    )
    print()
    print_table(
        ["environment variable", "value", "meaning"],
        [
            (v["name"], v["value"] or f"(not set: {v['fallback']})", v["meaning"])
            for v in environment
        ],
    )

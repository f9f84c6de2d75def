"""The replay's own parts: traces, pages, the engine's steps, and that its check can fail."""

import numpy as np
import pytest

from plait.replay import session
from plait.replay.engine import Engine
from plait.replay.model import Model
from plait.replay.pages import PagePool
from plait.replay.session import Options, replay
from plait.replay.trace import TraceRequest, read_trace

MOONCAKE = """{"timestamp": 20, "input_length": 1300, "output_length": 40, "hash_ids": [0, 1, 2]}
{"timestamp": 10, "input_length": 513, "output_length": 1, "hash_ids": [0, 7]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.9305900,3,109
"""


MOONCAKE_LINE = (
    '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
)


def write(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_mooncake_is_read_and_scaled(tmp_path):
    first, second = read_trace(write(tmp_path, MOONCAKE), "1/32")
    assert first == TraceRequest(10.0, 17, 1, (0, 7), 16)  # 513 / 32, rounded up
    assert second == TraceRequest(20.0, 41, 2, (0, 1, 2), 16)
    assert [r.input_len for r in read_trace(write(tmp_path, MOONCAKE), 1)] == [513, 1300]


def test_azure_is_told_apart_by_content(tmp_path):
    first, second = read_trace(write(tmp_path, AZURE, "trace.jsonl"), "0.5")
    assert (first.arrival_ms, first.input_len, first.output_len) == (0.0, 187, 22)
    assert (second.arrival_ms, second.input_len, second.output_len) == (1250.0, 2, 55)
    assert first.hash_ids == () and first.block_tokens == 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("hello\n", "trace:1: neither Mooncake JSONL"),
        ("", "trace:1: neither"),
        ('{"timestamp": 1}\n', "trace:1: not a Mooncake request"),
        (MOONCAKE + "{]\n", "trace:3: not a Mooncake request"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [0]}\n',
            "trace:1: 1 hash_ids for 513 tokens",
        ),
        (
            '{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": []}\n',
            "a length is -5",
        ),
        (MOONCAKE_LINE % "NaN", "trace:1: not a Mooncake request"),
        (MOONCAKE_LINE % "null", "trace:1: not a Mooncake request"),
        (MOONCAKE_LINE.replace("600", "null") % 0, "trace:1: a length is None"),
        (MOONCAKE_LINE.replace("600", "1e30") % 0, "trace:1: a length is 1e"),
        (MOONCAKE_LINE.replace("[1, 2]", "[[1], [2]]") % 0, "trace:1: not a Mooncake request"),
        (AZURE + "2023-11-16 18:15:47,3\n", "trace:4: not an Azure request"),
    ],
)
def test_bad_traces_are_refused_by_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize("scale", ["0", "-1", "1/1000", "1/0", "x"])
def test_bad_scales_are_refused(tmp_path, scale):
    with pytest.raises(ValueError, match="scale is"):
        read_trace(write(tmp_path, AZURE), scale)


def test_pages_are_counted_and_found_again():
    pool = PagePool(2)
    a = pool.take()
    assert pool.share("x") is None
    pool.publish(a, "x")
    assert pool.share("x") == a
    pool.release(a)
    assert pool.num_free == 1  # one reference is left
    pool.release(a)
    assert pool.num_free == 2 and pool.share("x") == a  # free, yet its content is still there
    pool.release(a)
    assert pool.take() != a  # the least lately freed goes first
    assert pool.take() == a and pool.share("x") is None  # taken for something else


def random_trace(rng, num_requests, block=16):
    """Requests with shared prefixes; lengths around the page and block sizes."""
    ids = iter(range(1, 10**6))
    prefixes, trace = [[]], []
    for i in range(num_requests):
        prefix = list(prefixes[rng.integers(len(prefixes))])
        hash_ids = prefix + [next(ids) for _ in range(rng.integers(1, 4))]
        prefixes.append(hash_ids[: rng.integers(1, len(hash_ids) + 1)])
        full = rng.random() < 0.3
        length = len(hash_ids) * block - (0 if full else int(rng.integers(0, block)))
        trace.append(
            TraceRequest(float(i // 3), length, int(rng.integers(1, 9)), tuple(hash_ids), block)
        )
    return trace


@pytest.mark.parametrize(
    "seed, page_size, num_pages",
    [(0, 16, 64), (1, 16, 12), (2, 5, 60), (3, 1, 300), (4, 32, 8), (5, 64, 5)],
)
def test_steps_keep_the_books(seed, page_size, num_pages):
    """A page is written once a content; whoever reads a page reads what was written there."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, 40)
    num_pages = max(num_pages, max(-(-(r.input_len + r.output_len) // page_size) for r in trace))
    engine = Engine(trace, page_size=page_size, num_pages=num_pages, max_batch=6, chunk=24)
    model = Model(num_qo_heads=1, num_kv_heads=1, head_dim=8, dtype="float32")
    cache = np.full((num_pages * page_size, 8), np.nan, np.float32)
    now = steps = shared = 0
    while not engine.done:
        step = engine.schedule(now)
        now += 1
        if step is None:
            continue
        steps += 1
        assert steps < 5000
        assert step.qo_indptr[-1] <= 24 and len(step.running) <= 6
        assert len(set(step.request_map)) == len(step.running)
        written = set()
        for i, r in enumerate(step.running):
            positions = step.positions[step.qo_indptr[i] : step.qo_indptr[i + 1]]
            assert (positions == np.arange(r.num_cached, r.num_cached + r.num_new)).all()
            assert step.kv_len[i] == r.num_cached + r.num_new
            slots = (
                engine.block_table[step.request_map[i], positions // page_size].astype(int)
                * page_size
                + positions % page_size
            )
            assert not written & set(slots), "two requests write one slot"
            written |= set(slots)
            cache[slots] = model.keys_values(r, positions)[0][:, 0]
        for i, r in enumerate(step.running):
            positions = np.arange(step.kv_len[i])
            slots = (
                engine.block_table[step.request_map[i], positions // page_size].astype(int)
                * page_size
                + positions % page_size
            )
            assert np.array_equal(cache[slots], model.keys_values(r, positions)[0][:, 0])
        shared = max(shared, engine.pool.num_shared)
        engine.finish(step)
    assert engine.num_finished == len(trace)
    assert engine.pool.num_free == num_pages, "a page was not given back"
    if page_size <= 16:
        assert engine.num_shared_tokens > 0
    if num_pages < 20:
        assert engine.num_preempted > 0


def test_engine_refuses_what_never_fits():
    with pytest.raises(ValueError, match="101 tokens, 7 pages of 16; the cache has 6"):
        Engine([TraceRequest(0.0, 100, 1)], page_size=16, num_pages=6, max_batch=4, chunk=16)
    with pytest.raises(ValueError, match="less than max_batch"):
        Engine([], page_size=16, num_pages=6, max_batch=4, chunk=3)


SMALL = dict(
    num_qo_heads=4, num_kv_heads=2, head_dim=32, max_batch=8, chunk=64, check_every=1, step_ms=1.0
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [16, 3])
def test_replay_meets_the_reference(dtype, page_size):
    trace = random_trace(np.random.default_rng(7), 12)
    report = replay(trace, Options(dtype=dtype, page_size=page_size, **SMALL))
    assert report.failures == []
    assert report.requests == len(trace) and report.steps_checked == report.steps > 10
    assert report.shared_tokens > 0
    assert (
        report.tokens == sum(r.input_len + r.output_len - 1 for r in trace) - report.shared_tokens
    )


@pytest.mark.parametrize("page_size", [16, 3])
def test_shared_replay_meets_the_reference(page_size):
    """Every row of every step again, with prompts that many requests have in common: fewer bytes
    are read, by what the nodes say."""
    head = tuple(range(100, 124))  # 384 tokens
    trace = [
        TraceRequest(0.0, 384 + 16 * (i % 3) + 5, 6, head + tuple(1000 * i + j for j in range(3)[: 1 + i % 3]), 16)
        for i in range(8)
    ]
    options = SMALL | dict(chunk=256, dtype="float32", page_size=page_size)
    report = replay(trace, Options(**options, share=True))
    flat = replay(trace, Options(**options))
    assert report.failures == [] and report.steps_checked == report.steps == flat.steps
    assert report.nodes >= report.nodes_shared > 0
    assert report.bytes_not_read > 0 and report.bytes + report.bytes_not_read == flat.bytes
    assert flat.bytes_not_read == 0 and flat.compose_us == []


def test_a_trace_without_hashes_has_nothing_to_share():
    with pytest.raises(ValueError, match="no hash_ids"):
        replay([TraceRequest(0.0, 5, 1)], Options(**SMALL, share=True))


def test_empty_trace():
    report = replay([], Options(**SMALL))
    assert report.steps == 0 and report.failures == []


@pytest.mark.parametrize("fault", ["append", "lse", "row"])
def test_the_check_can_fail(monkeypatch, fault):
    if fault == "append":  # nothing is written: the cache stays NaN
        monkeypatch.setattr(session, "append_kv", lambda *args, **kwargs: None)
    else:
        run = session.Attention.run

        def off(self, *args, **kwargs):
            out, lse = run(self, *args, **kwargs)
            if fault == "lse":
                lse += 1e-3
            else:
                out *= np.float32(1.001)
            return out, lse

        monkeypatch.setattr(session.Attention, "run", off)
    trace = random_trace(np.random.default_rng(7), 3)
    report = replay(trace, Options(dtype="float32", **SMALL))
    assert len(report.failures) == report.steps_checked > 0
    assert not report.worst <= 1

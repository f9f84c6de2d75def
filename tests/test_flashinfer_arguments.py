"""plait.flashinfer: no argument passes unseen. What is no value of any argument is refused in each
argument's place, by its name; but for hints, and flags, which take any truth value.
"""

import inspect

import pytest

torch = pytest.importorskip("torch")

from plait import flashinfer  # noqa: E402

from flashinfer_cases import (  # noqa: E402
    BF16, DIM, HEADS, KV_HEADS, decode_wrapper, indptr, paged, prefill_wrapper, values, workspace,
)

HINTS = {"use_tensor_cores", "enable_pdl", "non_blocking", "use_fp16_qk_reduction"}
FLAGS = {"causal", "return_lse", "use_cuda_graph", "disable_split_kv"}


class Nothing:
    def __repr__(self):
        return "Nothing()"


def calls():
    """(label, callable, arguments that are right): every published callable once."""
    cache = paged([1, 16, 33], 16)
    i, x, n = cache.tables()
    kv = {"paged_kv_cache": cache.cache}
    q, one, k = (values((rows, heads, DIM), BF16, "cpu", 7)
                 for rows, heads in ((6, HEADS), (3, HEADS), (20, KV_HEADS)))
    s = torch.zeros(6, HEADS)
    heads = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS}
    dims = heads | {"q_data_type": BF16, "head_dim_qk": DIM}
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (4, 9, 3)]
    graph = dict(zip(("indptr_buffer", "indices_buffer", "last_page_len_buffer"), buffers))
    memory = {"float_workspace_buffer": workspace("cpu")}
    decode, prefill = decode_wrapper("cpu"), prefill_wrapper("cpu")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    mixed = flashinfer.BatchAttention("NHD", "cpu")
    plans = {
        decode: {"indptr": i, "indices": x, "last_page_len": n, "head_dim": DIM, "page_size": 16,
                 "q_data_type": BF16} | heads,
        prefill: {"qo_indptr": indptr([1, 2, 3]), "paged_kv_indptr": i, "paged_kv_indices": x,
                  "paged_kv_last_page_len": n, "page_size": 16} | dims,
        ragged: {"qo_indptr": indptr([1, 2, 3]), "kv_indptr": indptr([2, 10, 8])} | dims,
        mixed: {"qo_indptr": indptr([1, 2, 3]), "kv_indptr": i, "kv_indices": x,
                "kv_len_arr": torch.tensor(cache.lens), "head_dim_vo": DIM, "page_size": 16} | dims,
    }
    runs = {decode: {"q": one} | kv, prefill: {"q": q} | kv, ragged: {"q": q, "k": k, "v": k},
            mixed: {"q": q, "kv_cache": cache.cache}}
    for wrapper, plan in plans.items():
        name = type(wrapper).__name__
        wrapper.plan(**plan)
        yield f"{name}.plan", getattr(wrapper, "_plan_impl", wrapper.plan), plan
        yield f"{name}.run", wrapper.run, runs[wrapper]
        if wrapper is not mixed:
            yield name, type(wrapper), memory
            yield f"{name}.forward", wrapper.forward, runs[wrapper]
            if wrapper is not ragged:
                yield f"{name}.workspace_size", wrapper.workspace_size, plan
    yield "BatchDecode, graph", type(decode), memory | {"use_cuda_graph": True} | {
        f"paged_kv_{name}": buffer for name, buffer in graph.items()}
    yield "CUDAGraphBatchDecode", flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, {
        "workspace_buffer": workspace("cpu")} | graph
    yield "BatchAttention", flashinfer.BatchAttention, {"device": "cpu"}
    where = dict(zip(("batch_indices", "positions"), flashinfer.get_batch_indices_positions(
        indptr([1, 2, 3]), torch.tensor(cache.lens), 6)))
    for name, arguments in {
        "single_decode_with_kv_cache": {"q": one[0], "k": k, "v": k},
        "single_prefill_with_kv_cache": {"q": q, "k": k, "v": k},
        "merge_state": {"v_a": q, "s_a": s, "v_b": q, "s_b": s},
        "merge_state_in_place": {"v": q.clone(), "s": s.clone(), "v_other": q, "s_other": s},
        "merge_states": {"v": q[None], "s": s[None]},
        "get_batch_indices_positions": {"append_indptr": indptr([1, 2]), "nnz": 3,
                                        "seq_lens": torch.tensor([3, 4])},
        "get_seq_lens": {"kv_indptr": i, "kv_last_page_len": n, "page_size": 16},
        "append_paged_kv_cache": {"append_key": k[:6], "append_value": k[:6], "kv_indices": x,
                                  "kv_indptr": i, "kv_last_page_len": n} | where | kv,
        "packbits": {"x": torch.ones(5)},
        "segment_packbits": {"x": torch.ones(5), "indptr": torch.tensor([0, 2, 5])},
    }.items():
        yield name, getattr(flashinfer, name), arguments


CALLS = {label: (function, arguments) for label, function, arguments in calls()}


@pytest.mark.parametrize("label", CALLS)
def test_nothing_is_refused_in_every_argument(label):
    function, arguments = CALLS[label]
    function(**arguments)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL or name in HINTS | FLAGS:
            continue
        with pytest.raises((TypeError, ValueError)) as error:
            function(**arguments | {name: Nothing()})
        assert name in str(error.value), f"{label}, {name}: {error.value}"


def test_sizes_that_cannot_be():
    decode = CALLS["BatchDecodeWithPagedKVCacheWrapper.plan"]
    for name, value in (("page_size", 0), ("num_qo_heads", 0), ("num_kv_heads", -2)):
        with pytest.raises(ValueError, match=f"plan: {name} is {value}"):
            decode[0](**decode[1] | {name: value})

"""invariant=True on a GPU: eager against a replayed graph, plans of the device against the host's."""

import numpy as np
import pytest
import torch

import plait

from harness import same_bits

HEADS, KV_HEADS, DIM, PAGE, PAGES = 32, 8, 128, 16, 1024


def bits_of(*tensors):
    torch.cuda.synchronize()
    return [x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).cpu().numpy()
            for x in tensors]


@pytest.mark.parametrize("max_ctas", [0, 50])
def test_graph_and_device_plan_have_the_bits_of_a_batch_of_one(max_ctas):
    torch.manual_seed(3)
    lengths = [(1, 5000), (1, 70), (200, 3000), (1, 1024), (1, 1025), (0, 10), (7, 2047)]
    requests, rows = len(lengths), sum(q for q, _ in lengths)
    q = 2 * torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    cache = [torch.randn(PAGES, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
             for _ in range(2)]
    width = -(-max(kv for _, kv in lengths) // PAGE)
    table = np.random.default_rng(1).integers(0, PAGES, (requests, width)).astype(np.int32)
    qo_indptr = np.cumsum([0] + [n for n, _ in lengths]).astype(np.int32)
    kv_len = np.array([n for _, n in lengths], np.int32)

    def attention(query_tokens, max_q_len, **options):
        return plait.Attention(
            num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, kv=plait.PagedKv(PAGE),
            device="cuda:0", variant=plait.causal(), invariant=True, max_ctas=max_ctas, **options,
            bounds=plait.Bounds(requests=requests, query_tokens=query_tokens, keys=5000,
                                max_q_len=max_q_len))

    batch = attention(rows, 0)
    out, lse = torch.empty_like(q), torch.empty(rows, HEADS, device="cuda")
    batch.plan(qo_indptr=qo_indptr, kv_len=kv_len, block_table=table)
    batch.run(q, cache, out=out, lse=lse)
    want = bits_of(out, lse)

    for r, (q_len, _) in enumerate(lengths):  # alone, decode in the kernel of few rows
        if q_len == 0:
            continue
        one = attention(q_len, q_len)
        one.plan(qo_indptr=np.array([0, q_len]), kv_len=kv_len[r:r + 1], block_table=table[r:r + 1])
        begin, end = qo_indptr[r], qo_indptr[r + 1]
        for got, all_rows in zip(bits_of(*one.run(q[begin:end], cache)), want):
            same_bits(got, all_rows[begin:end], f"request {r} alone ")

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        batch.run(q, cache, out=out, lse=lse)
    out.zero_(), lse.zero_()
    graph.replay()
    for got, all_rows in zip(bits_of(out, lse), want):
        same_bits(got, all_rows, "replayed ")

    put = torch.from_numpy
    batch.plan(qo_indptr=put(qo_indptr).cuda(), kv_len=put(kv_len).cuda(),
               block_table=put(table).cuda())
    out.zero_(), lse.zero_()
    batch.run(q, cache, out=out, lse=lse)
    for got, all_rows in zip(bits_of(out, lse), want):
        same_bits(got, all_rows, "planned on the device ")

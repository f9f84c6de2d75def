"""torch.ops.plait: schemas and fake kernels hold, and one compiled graph serves every plan."""

import gc

import numpy as np
import pytest

import plait

torch = pytest.importorskip("torch")
torch_ops = pytest.importorskip("plait.torch_ops")


def make(q_len=3, kv_len=20, variant=None):
    attention = plait.Attention(
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=32,
        head_dim_vo=16,
        dtype="float32",
        variant=variant or plait.causal(),
        bounds=plait.Bounds(requests=2, query_tokens=16, keys=64),
    )
    attention.plan(qo_indptr=np.array([0, q_len]), kv_indptr=np.array([0, kv_len]))
    torch.manual_seed(q_len)
    return (
        attention,
        torch.randn(q_len, 4, 32),
        torch.randn(kv_len, 2, 32),
        torch.randn(kv_len, 2, 16),
    )


def test_operators_pass_opcheck():
    attention, q, k, v = make()
    number = torch_ops.handle(attention)
    torch.library.opcheck(torch.ops.plait.attention.default, (number, q, k, v))
    torch.library.opcheck(torch.ops.plait.attention.default, (number, q, k, v, 0.3))
    torch.library.opcheck(
        torch.ops.plait.run.default, (number, q, k, v, torch.zeros(3, 4, 16), torch.zeros(3, 4))
    )


def test_operator_is_run():
    attention, q, k, v = make()
    number = torch_ops.handle(attention)
    assert torch_ops.handle(attention) == number
    for scale in (None, 0.3):
        out, lse = torch.ops.plait.attention(number, q, k, v, scale)
        want, want_lse = attention.run(q, (k, v), sm_scale=scale)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_serves_every_plan(backend):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph if backend == "eager" else torch._dynamo.lookup_backend(backend)(graph, inputs)

    @torch.compile(backend=count, fullgraph=True, dynamic=True)
    def layer(number, q, k, v):
        out, lse = torch.ops.plait.attention(number, 2 * q, k, v)
        return out + 1, lse

    kept = []
    for q_len, kv_len in ((3, 20), (5, 33), (4, 64)):
        attention, q, k, v = make(q_len, kv_len)
        kept.append(attention)
        out, _ = layer(torch_ops.handle(attention), q, k, v)
        assert torch.equal(out, attention.run(2 * q, (k, v))[0] + 1)
    assert len(graphs) == 1


def test_what_is_no_handle_is_refused():
    attention, q, k, v = make()
    number = torch_ops.handle(attention)
    del attention
    gc.collect()
    with pytest.raises(ValueError, match=f"no Attention has handle {number}"):
        torch.ops.plait.attention(number, q, k, v)
    sigmoid = plait.custom(
        "square",
        "Square",
        """struct Square {
      PLAIT_HD static float logits_transform(const Params&, const LogitContext&, float x) {
        return x * x;
      }
    };""",
        use_softmax=False,
    )
    with pytest.raises(ValueError, match="without softmax"):
        torch_ops.handle(make(variant=sigmoid)[0])

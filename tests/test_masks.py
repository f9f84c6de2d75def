"""Custom masks and positions beyond the matrix: bad ones, replanning, trees of drafts; RoPE far
out."""

import numpy as np
import pytest

import plait
from plait import reference

from harness import Case, attend, build, compare, compare_with_reference, execute
from variants import VARIANTS, Rope, TestVariant


def attention(variant=None, requests=2):
    return plait.Attention(
        num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32",
        variant=plait.custom_mask() if variant is None else variant,
        bounds=plait.Bounds(requests=requests, query_tokens=16, keys=64))


LENGTHS = {"qo_indptr": np.array([0, 3, 5]), "kv_indptr": np.array([0, 10, 30])}
BITS = np.zeros(4 + 5, np.uint8)  # 3 x 10 and 2 x 20 bits

BAD = {
    "no mask": ({}, "takes a mask every step, and none is given"),
    "both": ({"packed_custom_mask": BITS, "custom_mask": np.zeros(70, bool)}, "both given"),
    "bits too short": ({"packed_custom_mask": BITS[:8]},
                       "packed_custom_mask has 8 bytes, but request 1 with 2 queries and 20 masked "
                       "keys needs it to have 9"),
    "bits too long": ({"packed_custom_mask": np.zeros(10, np.uint8)}, "10 bytes, but the requests' "
                      "masks are 9"),
    "bools too short": ({"custom_mask": np.zeros(69, bool)}, "custom_mask has 69 bools"),
    "bits of another dtype": ({"packed_custom_mask": BITS.astype(np.int32)},
                              "int32[9] on cpu; it must be uint8"),
    "bools as bytes": ({"custom_mask": np.zeros(70, np.uint8)}, "it must be bool"),
    "strided": ({"packed_custom_mask": np.zeros(18, np.uint8)[::2]}, "stride 2 in dimension 0"),
    "two dimensions": ({"custom_mask": np.zeros((7, 10), bool)}, "must be 1-D"),
    "indptr alone": ({"mask_indptr": np.array([0, 4, 9])}, "mask_indptr is given without"),
    "first key alone": ({"first_masked_key": np.array([0, 0])}, "first_masked_key is given without"),
    "indptr of other sizes": ({"packed_custom_mask": BITS, "mask_indptr": np.array([0, 5, 9])},
                              "mask_indptr[0] and [1] are 0 and 5, but request 0 has 3 queries and 10 "
                              "masked keys: 4 bytes"),
    "negative indptr": ({"packed_custom_mask": BITS, "mask_indptr": np.array([-4, 0, 5])},
                        "mask_indptr[0] and [1] are -4"),
    "indptr past the end": ({"packed_custom_mask": BITS, "mask_indptr": np.array([1, 5, 10])},
                            "needs it to have 10"),
    "indptr too short": ({"packed_custom_mask": BITS, "mask_indptr": np.array([0, 4])},
                         "mask_indptr has 2 entries; it must have 3"),
    "first key past the end": ({"packed_custom_mask": BITS, "first_masked_key": np.array([11, 0])},
                               "first_masked_key[0] is 11; request 0 has 10 keys"),
    "first key negative": ({"packed_custom_mask": BITS, "first_masked_key": np.array([0, -1])},
                           "first_masked_key[1] is -1"),
    "first keys too few": ({"packed_custom_mask": BITS, "first_masked_key": np.array([0])},
                           "first_masked_key has 1 entries; it must have 2"),
    "positions too few": ({"packed_custom_mask": BITS, "q_positions": np.arange(4)},
                          "q_positions has 4 entries; it must have 5"),
    "position too large": ({"packed_custom_mask": BITS,
                            "q_positions": np.array([0, 1, 2, 2**30, 4])},
                           "q_positions[3] is 1073741824"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks_leave_the_plan_before(name):
    arguments, text = BAD[name]
    attn = attention()
    before = attn.plan(**LENGTHS, packed_custom_mask=BITS)
    with pytest.raises(ValueError) as error:
        attn.plan(**LENGTHS, **arguments)
    assert text in str(error.value), str(error.value)
    assert attn.current_plan == before


def test_a_mask_needs_a_variant_that_takes_one():
    with pytest.raises(ValueError, match="variant 'causal' takes none; make the Attention with"):
        attention(plait.causal()).plan(**LENGTHS, packed_custom_mask=BITS)


def test_tiles_before_the_first_masked_key_need_no_mask():
    attn = attention(requests=3)
    plan = attn.plan(qo_indptr=np.array([0, 3, 5, 6]), kv_indptr=np.array([0, 10, 30, 31]),
                     packed_custom_mask=np.zeros(1 + 2, np.uint8),
                     first_masked_key=np.array([8, 13, 1]))
    begin = {0: 8, 1: 13, 2: 1}
    for item in plan.items:
        assert item["mask_begin"] == begin[item["row_block"]]
    plan = attention(plait.causal()).plan(**LENGTHS)
    assert (plan.items["mask_begin"] == 2**31 - 1).all()


@pytest.mark.parametrize("format", ["csr_p16", "shared_p16"])
def test_every_plan_brings_its_own_mask(device, kernel, format):
    """The next step's mask, of other sizes, replaces the last one's; an item of several requests
    starts to look at bits where the first of them has some."""
    for lengths in (((3, 40), (5, 130)), ((1, 9),), ((8, 300), (1, 3), (4, 77))):
        built = build(Case(format, "mask_last", lengths, max_requests=3, max_query_tokens=16,
                           max_keys=400, max_pages=100), device, kernel)
        _, out, lse = execute(built)
        compare_with_reference(built, out, lse)


# A tree of drafts behind each request's keys: parent of every node, the first has none.
TREE = (-1, 0, 0, 1, 1, 2, 4)


def test_tree_of_drafts(device, kernel):
    """Mask bits over the drafts alone, positions from their depth, RoPE of Q and ALiBi by these."""
    n = len(TREE)
    depth = np.zeros(n, int)
    sees = np.eye(n, dtype=bool)
    for i, parent in enumerate(TREE):
        if parent >= 0:
            depth[i] = depth[parent] + 1
            sees[i] |= sees[parent]
    kv_lens = [n, 70, 129 + n]
    rng = np.random.default_rng(3)
    dtype = "float16"

    def values(*shape):
        return reference.from_storage(reference.to_storage(rng.standard_normal(shape), dtype), dtype)

    q = values(3 * n, 4, 64)
    k, v = ([values(kv_len, 2, 64) for kv_len in kv_lens] for _ in range(2))
    slopes = plait.alibi_slopes(4)
    positions = np.concatenate([kv_len - n + depth for kv_len in kv_lens])
    bits = np.packbits(sees.ravel(), bitorder="little")

    class Functors(reference.Functors):
        def logits_transform(self, logit, c):
            return logit + slopes[c.qo_head].astype(logit.dtype) * (c.k_pos - c.q_pos)

        def logits_mask(self, c):
            kv_len = c.k_pos.shape[-1]
            return np.concatenate([np.ones((n, kv_len - n), bool), sees], 1)[:, None, :]

    variant = TestVariant(lambda: plait.custom_mask() | plait.alibi(), Functors(),
                          arguments=lambda h, d: {"slopes": slopes})
    case = Case("csr_p16", variant, tuple((n, kv_len) for kv_len in kv_lens), dtype, 64,
                num_kv_heads=2, group_size=2)
    built = build(case, device, kernel, (q, k, v))
    built.plan_args |= {"packed_custom_mask": np.tile(bits, 3), "q_positions": positions,
                        "first_masked_key": np.array(kv_lens) - n}
    _, out, lse = execute(built)
    for i in range(len(kv_lens)):
        at = slice(i * n, (i + 1) * n)
        options = {"q_pos": positions[at], "functors": Functors()}
        want, want_lse = reference.attention(q[at], k[i], v[i], **options)
        plain, plain_lse = reference.attention(
            q[at], k[i], v[i], **options, real=np.float32,
            stored=lambda x: reference.rounded(x, dtype))
        compare("out", reference.from_storage(out[at], dtype), want,
                2 * np.abs(plain - want).max() + 2.0**-11 * np.abs(want) + 1e-5)
        compare("lse", lse[at], want_lse, 2 * np.abs(plain_lse - want_lse).max() + 2e-5)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rope_at_the_end_of_a_million_keys(device, kernel, theta):
    """One float32 of an angle would be off by 0.03 radians there."""
    variant = TestVariant(lambda: plait.causal() | plait.sliding_window(300) | plait.rope(theta=theta),
                          Rope(False, theta), {"causal": True, "window_left": 300})
    rng = np.random.default_rng(5)
    keys = (1 << 20) + 57
    k, v = (np.zeros((keys, 1, 64), np.float32) for _ in range(2))
    for x in (k, v):
        x[-400:] = rng.standard_normal((400, 1, 64))
    q = rng.standard_normal((3, 2, 64)).astype(np.float32)
    out, lse, _ = attend((q, [k], [v]), device, kernel, format="ragged", variant=variant,
                         dtype="float32")
    want, want_lse = reference.attention(
        q, k[-400:], v[-400:], q_pos=keys - 3 + np.arange(3), k_pos=keys - 400 + np.arange(400),
        causal=True, window_left=300, functors=Rope(False, theta))
    compare("out", out, want, 2e-5)
    compare("lse", lse, want_lse, 2e-5)


def test_rotary_dim_beyond_the_head_is_refused():
    with pytest.raises(ValueError, match="rotary_dim is 16, but head_dim_qk is 8"):
        attention(plait.rope(rotary_dim=16))


@pytest.mark.parametrize("name,size", [("alibi", "num_qo_heads"), ("rms_norm_rope", "head_dim_qk")])
def test_tensors_of_the_wrong_size_are_refused(name, size):
    built = build(Case("ragged", name, "one", "float32", 64), "cpu")
    argument = sorted(built.variant_args)[0]
    built.variant_args[argument] = built.variant_args[argument][1:]
    with pytest.raises(ValueError, match=f"{argument}.*{size}"):
        execute(built)


def test_order_of_the_parts_is_the_order_of_their_work():
    assert (plait.soft_cap(3) | plait.alibi()).name == "soft_cap|alibi"
    assert (plait.rms_norm() | plait.rope()).name == "rms_norm_q|rms_norm_k|rope"
    assert plait.rms_norm(q=False).name == "rms_norm_k"
    with pytest.raises(ValueError, match="both False"):
        plait.rms_norm(q=False, k=False)
    with pytest.raises(ValueError, match="stands twice"):
        plait.custom_mask() | plait.custom_mask()
    with pytest.raises(TypeError, match="rope: interleave is 1"):
        plait.rope(interleave=1)
    assert VARIANTS["mask"].make().custom_mask and not plait.causal().custom_mask

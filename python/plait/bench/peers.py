"""Other attention libraries on the same data: each is compared with ours, then timed as we are.

All of them need torch; a package that is not there is named, never missed. FlashInfer plans and
FlashAttention-3's "planned" entry schedules beforehand, as plait does: run() alone is timed.
"""

import numpy as np

from plait.bench.timing import time_torch, torch_on

_LARGEST_DIFFERENCE = 0.03  # of a row's norm; two right bfloat16 results differ by 0.01 at most


class Differs(Exception):
    """The peer's output is not ours: one of the two is wrong."""


def _torch(array, fp8=None):
    """fp8: the name of a dtype that array has the bits of."""
    import torch

    tensor = torch.from_dlpack(array)
    return tensor if fp8 is None else tensor.view(getattr(torch, fp8))


def _int32(values, device):
    import torch

    return torch.tensor(values, dtype=torch.int32, device=device)


class Peer:
    """A way to run a case elsewhere. Raises ImportError where its package is missing."""

    name = ""
    variants = ("causal", "full")
    fp8_kv = False  # whether it takes K and V in fp8 beside q in 16 bits
    composed = False  # whether it takes a shared prefix as a level of its own, and nothing else
    compiles = False  # something at first use that is worth doing side by side

    def __init__(self, device):
        self.device = device

    def refusal(self, case):
        """Why the peer does not take this case; "" if it does."""
        if case.group == "tiles":
            return "tiles stand beside each other"
        if case.call != "graph" or case.requests_bound:
            return "ways to launch stand beside each other"
        if case.scheduler != "auto":
            return "schedulers stand beside each other"
        if self.composed != (case.num_levels > 1 and case.shared_len > 0):
            return "it takes composed batches" if self.composed else "it takes flat batches"
        if case.variant not in self.variants:
            return f"{case.variant} is not among {', '.join(self.variants)}"
        if case.kv_dtype is not None and not self.fp8_kv:
            return "it takes K and V of q's dtype"
        return ""

    def module(self, case):
        """Cases with equal keys share what is compiled."""
        return ()

    def work(self, workload):
        """A function that puts one run on torch's current stream and returns out
        [tokens, num_qo_heads, head_dim]."""
        raise NotImplementedError

    def time(self, workload, seconds):
        """us of a run. Raises Differs, or what the package does."""
        work, last = self.work(workload), []

        def keep():
            last[:] = [work()]

        keep()
        self._compare(workload, last[0], "")
        us = time_torch(self.device, keep, seconds).median_us
        self._compare(workload, last[0], "in the graph ")  # where something may run on no stream
        return us

    @staticmethod
    def _compare(workload, theirs, where):
        ours, theirs = _torch(workload.out).float(), theirs.float()
        norm = ours.norm(dim=-1).clamp_min(1e-3)
        worst = ((ours - theirs).norm(dim=-1) / norm).max().item()
        if not worst <= _LARGEST_DIFFERENCE:
            raise Differs(f"its output {where}differs from ours by {worst:.3g} of a row's norm")


class _FlashInfer(Peer):
    compiles = True

    def __init__(self, device):
        super().__init__(device)
        import flashinfer
        import torch

        self._library = flashinfer
        self._memory = torch.zeros(512 << 20, dtype=torch.uint8, device=device)

    def module(self, case):
        return (case.head_dim, case.dtype, case.kv_dtype)

    def _heads(self, case):
        return case.num_qo_heads, case.num_kv_heads, case.head_dim

    def _pages(self, w):
        """kv_page_indptr, kv_page_indices, kv_last_page_len on the device."""
        last = (w.kv_len - 1) % w.case.page_size + 1
        return (_int32(x, self.device) for x in (w.page_indptr, w.page_indices, last))

    def _data(self, w):
        """q, (k, v), an out of its own, and the dtype arguments of plan()."""
        q = _torch(w.q)
        k, v = (_torch(x, w.case.kv_dtype) for x in w.cache)
        return q, (k, v), q.new_empty(q.shape), dict(q_data_type=q.dtype, kv_data_type=k.dtype)


class _FlashInferPrefill(_FlashInfer):
    backend = ""

    def work(self, w):
        q, (k, v), out, dtypes = self._data(w)
        qo_indptr = _int32(w.qo_indptr, self.device)
        how = dict(causal=w.case.variant == "causal", **dtypes)
        if not w.case.page_size:
            wrapper = self._library.BatchPrefillWithRaggedKVCacheWrapper(
                self._memory, "NHD", backend=self.backend
            )
            kv_indptr = _int32(w.kv_indptr, self.device)
            wrapper.plan(qo_indptr, kv_indptr, *self._heads(w.case), **how)
            return lambda: wrapper.run(q, k, v, out=out)
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._memory, "NHD", backend=self.backend
        )
        if w.case.variant == "draft_mask":
            how["custom_mask"] = self._mask(w)
        wrapper.plan(qo_indptr, *self._pages(w), *self._heads(w.case), w.case.page_size, **how)
        return lambda: wrapper.run(q, (k, v), out=out)

    def _mask(self, w):
        """Bits over all keys of a request, which is how FlashInfer takes a mask of drafts."""
        import torch

        at = [
            torch.arange(k)[None] <= torch.arange(q)[:, None] + (k - q)
            for q, k in zip(w.case.q_len, w.case.kv_len)
        ]
        return torch.cat([x.flatten() for x in at]).to(self.device)


class FlashInferFa3(_FlashInferPrefill):
    name, backend = "flashinfer-fa3", "fa3"


class FlashInferFa2(_FlashInferPrefill):
    name, backend = "flashinfer-fa2", "fa2"
    fp8_kv = True
    variants = ("causal", "full", "draft_mask")

    def work(self, w):
        """One query each goes through its decode wrapper, "tensor cores", on the same module."""
        if w.q_len.max() > 1 or w.case.variant != "causal" or not w.case.page_size:
            return super().work(w)
        return _flashinfer_decode(self, w, use_tensor_cores=True)


def _flashinfer_decode(peer, w, use_tensor_cores):
    q, kv, out, dtypes = peer._data(w)
    wrapper = peer._library.BatchDecodeWithPagedKVCacheWrapper(
        peer._memory,
        "NHD",
        use_tensor_cores=use_tensor_cores,
        backend="fa2" if use_tensor_cores else "auto",
    )
    wrapper.plan(*peer._pages(w), *peer._heads(w.case), w.case.page_size, **dtypes)
    return lambda: wrapper.run(q, kv, out=out)


class FlashInferDecode(_FlashInfer):
    name = "flashinfer-decode"
    fp8_kv = True
    variants = ("causal",)

    def refusal(self, case):
        if max(case.q_len) > 1 or not case.page_size:
            return "it takes paged batches of one query each"
        return super().refusal(case)

    def work(self, w):
        return _flashinfer_decode(self, w, use_tensor_cores=False)


class FlashInferCascade(_FlashInfer):
    """Its cascade of two levels, the shared prefix and the rest."""

    name = "flashinfer-cascade"
    variants = ("causal",)
    composed = True

    def work(self, w):
        q, kv, _, dtypes = self._data(w)
        pages, common = w.pages()
        # Each request's list begins with the pages of all.
        own = [
            w.page_indices[begin + common : end]
            for begin, end in zip(w.page_indptr, w.page_indptr[1:])
        ]
        indptr = np.concatenate([[0], np.cumsum(pages - common)])
        tables = (
            ([0, w.case.tokens], w.qo_indptr),
            ([0, common], indptr),
            (w.page_indices[:common], np.concatenate(own)),
            ([w.case.page_size], (w.kv_len - 1) % w.case.page_size + 1),
        )
        wrapper = self._library.MultiLevelCascadeAttentionWrapper(2, self._memory, "NHD")
        wrapper.plan(
            *([_int32(x, self.device) for x in levels] for levels in tables),
            *self._heads(w.case),
            w.case.page_size,
            causal=True,
            **dtypes,
        )
        return lambda: wrapper.run(q, kv)


class FlashInferPersistent(_FlashInfer):
    name = "flashinfer-persistent"
    variants = ("causal",)

    def refusal(self, case):
        return super().refusal(case) if case.page_size else "it takes paged batches"

    def work(self, w):
        q, kv, out, dtypes = self._data(w)
        wrapper = self._library.BatchAttention()
        page_indptr, page_indices, _ = self._pages(w)
        wrapper.plan(
            _int32(w.qo_indptr, self.device),
            page_indptr,
            page_indices,
            _int32(w.kv_len, self.device),
            *self._heads(w.case),
            w.case.head_dim,
            w.case.page_size,
            causal=True,
            **dtypes,
        )
        lse = q.new_empty(q.shape[:2], dtype=_float32())
        return lambda: wrapper.run(q, kv, out=out, lse=lse)[0]


def _float32():
    import torch

    return torch.float32


class FlashAttention3(Peer):
    """Its varlen and its paged entry; with pages equal lengths go in as a batch."""

    name = "fa3"
    variants = ("causal", "full", "window1k", "soft_cap")
    scheduled = False

    def __init__(self, device):
        super().__init__(device)
        try:
            import flash_attn_interface as library
        except ImportError as error:
            try:
                import fa3_fwd_interface as library
            except ImportError:
                raise error from None
        self._library = library

    def refusal(self, case):
        if self.scheduled and not case.page_size:
            return "only its paged entry takes a schedule"
        return super().refusal(case)

    def work(self, w):
        case = w.case
        q, k, v = (_torch(x) for x in (w.q, *w.cache))
        shape, how = q.shape, self._options(w)
        qo_indptr = _int32(w.qo_indptr, self.device)
        longest, function = int(w.q_len.max()), self._library.flash_attn_with_kvcache
        if not case.page_size:
            function = self._library.flash_attn_varlen_func
            kv_indptr, longest_kv = _int32(w.kv_indptr, self.device), int(w.kv_len.max())
            args = (q, k, v, qo_indptr, kv_indptr, longest, longest_kv)
        else:
            kv_len = _int32(w.kv_len, self.device)
            how |= dict(cache_seqlens=kv_len, page_table=self._table(w))
            if case.uniform:
                args = (q.view(len(w.q_len), longest, *q.shape[1:]), k, v)
            else:
                args = (q, k, v)
                how |= dict(cu_seqlens_q=qo_indptr, max_seqlen_q=longest)
            if self.scheduled:
                how["scheduler_metadata"] = self._schedule(w, kv_len, how, q.dtype)

        def run():
            out = function(*args, **how)
            return (out[0] if isinstance(out, tuple) else out).view(shape)

        return run

    @staticmethod
    def _options(w):
        how = dict(causal=w.case.variant != "full")
        if w.case.variant == "window1k":
            how["window_size"] = (w.variant.visible["window_left"], 0)
        if w.case.variant == "soft_cap":
            how["softcap"] = 30.0
        return how

    def _table(self, w):
        counts = np.diff(w.page_indptr)
        table = np.zeros((len(counts), counts.max()), np.int32)
        for row, begin, count in zip(table, w.page_indptr, counts):
            row[:count] = w.page_indices[begin : begin + count]
        return _int32(table, self.device)

    def _schedule(self, w, kv_len, how, dtype):
        case = w.case
        return self._library.get_scheduler_metadata(
            len(w.q_len),
            int(w.q_len.max()),
            self._table(w).shape[1] * case.page_size,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            kv_len,
            qkv_dtype=dtype,
            cu_seqlens_q=how.get("cu_seqlens_q"),
            page_size=case.page_size,
            causal=how["causal"],
            window_size=how.get("window_size", (-1, -1)),
            has_softcap="softcap" in how,
        )


class FlashAttention3Planned(FlashAttention3):
    name, scheduled = "fa3-planned", True


class FlashAttention3Dense(FlashAttention3):
    """Its entry for a batch of equal lengths, which needs no offsets."""

    name = "fa3-dense"

    def refusal(self, case):
        if case.page_size or not case.uniform:
            return "it takes ragged batches of equal lengths"
        return super().refusal(case)

    def work(self, w):
        batch = len(w.q_len)
        q, k, v = (_torch(x) for x in (w.q, *w.cache))
        dense = [x.view(batch, -1, *x.shape[1:]) for x in (q, k, v)]
        how = self._options(w)

        def run():
            out = self._library.flash_attn_func(*dense, **how)
            return (out[0] if isinstance(out, tuple) else out).view(q.shape)

        return run


class _Dense(Peer):
    """Takes [batch, heads, length, dim] alone: equal lengths, paged KV copied out beforehand."""

    def refusal(self, case):
        if not case.uniform:
            return "it takes requests of equal lengths"
        if case.variant != "full" and case.q_len[0] not in (1, case.kv_len[0]):
            return "it aligns a causal mask at the top left"
        return super().refusal(case)

    def _dense(self, w):
        q, k, v = (_torch(x) for x in (w.q, *w.cache))
        batch, q_len, kv_len = len(w.q_len), int(w.q_len[0]), int(w.kv_len[0])
        q = q.view(batch, q_len, *q.shape[1:])
        if w.case.page_size:
            slots = np.concatenate([w.slots(i) for i in range(batch)])
            slots = _int32(slots, self.device).long()
            k, v = (x.flatten(0, 1)[slots] for x in (k, v))
        k, v = (x.view(batch, kv_len, *x.shape[1:]) for x in (k, v))
        return [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    @staticmethod
    def _rows(out):
        """[batch, heads, length, dim] -> [tokens, heads, dim]."""
        return out.transpose(1, 2).flatten(0, 1)


class Cudnn(_Dense):
    """cuDNN through torch's SDPA: the common measure of runs with different packages."""

    name = "cudnn"

    def __init__(self, device):
        super().__init__(device)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._only = lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)

    def work(self, w):
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = self._dense(w)
        causal = w.case.variant != "full" and q.shape[2] > 1

        def run():
            with self._only():
                out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            return self._rows(out)

        return run


class FlexAttention(_Dense):
    name = "flex"
    variants = ("causal", "full", "window1k", "alibi", "custom_alibi", "soft_cap")
    compiles = False  # torch.compile is not for several threads

    def __init__(self, device):
        super().__init__(device)
        import torch
        from torch.nn.attention import flex_attention as library

        self._library = library
        self._function = torch.compile(library.flex_attention, dynamic=False)

    def work(self, w):
        import torch

        torch._dynamo.reset()  # beyond 8 compilations it would quietly run uncompiled
        q, k, v = self._dense(w)
        variant, how = w.case.variant, dict(enable_gqa=True)
        window = w.variant.visible.get("window_left", -1)
        if variant != "full" and q.shape[2] > 1:

            def visible(b, h, q_pos, k_pos):
                seen = q_pos >= k_pos
                return seen & (q_pos - k_pos <= window) if window >= 0 else seen

            how["block_mask"] = self._library.create_block_mask(
                visible, None, None, q.shape[2], k.shape[2], device=q.device
            )
        if variant in ("alibi", "custom_alibi"):
            slopes = _torch(w.run_args["slopes"])
            how["score_mod"] = lambda s, b, h, q_pos, k_pos: s + slopes[h] * (k_pos - q_pos)
        if variant == "soft_cap":
            how["score_mod"] = lambda s, b, h, q_pos, k_pos: 30.0 * torch.tanh(s / 30.0)
        return lambda: self._rows(self._function(q, k, v, **how))


PEERS = {
    peer.name: peer
    for peer in (
        Cudnn,
        FlashAttention3,
        FlashAttention3Dense,
        FlashAttention3Planned,
        FlashInferFa3,
        FlashInferFa2,
        FlashInferDecode,
        FlashInferCascade,
        FlashInferPersistent,
        FlexAttention,
    )
}
FAMILIES = {
    "flashinfer": [name for name in PEERS if name.startswith("flashinfer-")],
    "all": list(PEERS),
}


def resolve(names):
    """Names of peers for names and families; cudnn is always among them, so that runs with
    different packages can be compared. Raises ValueError for an unknown name."""
    wanted = []
    for name in [*names, "cudnn"]:
        if name not in PEERS and name not in FAMILIES:
            raise ValueError(
                f"--peers: {name!r} is no peer; known are {', '.join([*PEERS, *FAMILIES])}"
            )
        wanted += FAMILIES.get(name, [name])
    return list(dict.fromkeys(wanted))


def load(names, device):
    """(peers, [(name, why it is absent)])."""
    found, absent = [], []
    torch, why = torch_on(device) if names else (None, "")
    for name in names:
        if torch is None:
            absent.append((name, why))
            continue
        try:
            found.append(PEERS[name](device))
        except Exception as error:  # a broken package is as absent as none
            absent.append((name, f"{type(error).__name__}: {error}"))
    return found, absent

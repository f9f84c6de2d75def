"""Continuous batching in its smallest form: which requests run in a step, and in which pages.

A step holds every running request once: one token of those that decode, a chunk of the prompt of
those that do not yet, up to a budget of tokens. Page tables grow as tokens come; a request that
finishes gives its pages back, and where none are left the request that came last starts over.
Follows nano-vllm's LLMEngine.step (schedule, run, postprocess), without a model.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from plait.replay.pages import PagePool
from plait.replay.trace import TraceRequest


@dataclass
class Running:
    """A request that has pages."""

    request: TraceRequest
    index: int  # in the trace: says which content its tokens have
    slot: int  # its row of the block table
    pages: list = field(default_factory=list)
    num_cached: int = 0  # tokens whose K and V are in the cache
    num_published: int = 0  # pages that others may share
    num_new: int = 0  # tokens of the step

    @property
    def length(self):
        return (
            self.request.input_len + self.request.output_len - 1
        )  # the last token is not fed back


@dataclass
class Step:
    """What runs: the arrays that append_kv and plan take, and who is who."""

    running: list  # Running, in batch order
    qo_indptr: np.ndarray  # int32 [n + 1]
    kv_len: np.ndarray  # int32 [n], new tokens included
    request_map: np.ndarray  # int32 [n]: rows of block_table
    batch_indices: np.ndarray  # int32 [tokens]
    positions: np.ndarray  # int32 [tokens]
    block_table: np.ndarray  # int32 [max_batch, max pages]; the same array every step


class Engine:
    """Schedules the requests of a trace into steps.

    page_size tokens a page, num_pages of them; at most max_batch requests and chunk tokens a step.
    Raises ValueError if the longest request does not fit the pages.
    """

    def __init__(self, trace, *, page_size, num_pages, max_batch, chunk):
        longest = max((r.input_len + r.output_len for r in trace), default=1)
        self.max_pages = -(-longest // page_size)
        if self.max_pages > num_pages:
            raise ValueError(
                f"the longest request has {longest} tokens, {self.max_pages} pages of "
                f"{page_size}; the cache has {num_pages}"
            )
        if chunk < max_batch:
            raise ValueError(f"chunk is {chunk} tokens a step, less than max_batch {max_batch}")
        self.page_size, self.max_batch, self.chunk = page_size, max_batch, chunk
        self.pool = PagePool(num_pages)
        self.waiting = deque(enumerate(trace))
        self.running = []  # by admission
        self.free_slots = list(range(max_batch))[::-1]
        self.block_table = np.zeros((max_batch, self.max_pages), np.int32)
        self.num_finished = self.num_preempted = self.num_shared_tokens = 0

    @property
    def done(self):
        return not self.waiting and not self.running

    def schedule(self, now_ms):
        """The next step of requests that arrived by now_ms, or None if there are none."""
        self._admit(now_ms)
        budget = self.chunk
        scheduled = []
        # Decodes first, so that a long prompt delays nobody; each keeps its place by admission.
        for r in sorted(self.running, key=lambda r: r.num_cached < r.request.input_len):
            if r not in self.running:  # preempted meanwhile
                continue
            decodes = r.num_cached >= r.request.input_len
            r.num_new = min(1 if decodes else r.request.input_len - r.num_cached, budget)
            if r.num_new == 0:
                continue
            if not self._grow(r, scheduled):
                continue
            budget -= r.num_new
            scheduled.append(r)
        return self._arrays(scheduled) if scheduled else None

    def finish(self, step):
        """Books the tokens of a step that ran; requests that are done leave."""
        for r in step.running:
            r.num_cached += r.num_new
            self._publish(r)
            if r.num_cached >= r.length:
                self._leave(r)
                self.num_finished += 1

    def next_arrival_ms(self):
        return self.waiting[0][1].arrival_ms

    def _admit(self, now_ms):
        while (
            self.waiting
            and self.free_slots
            and self.pool.num_free > 0
            and self.waiting[0][1].arrival_ms <= now_ms
        ):
            index, request = self.waiting.popleft()
            r = Running(request, index, self.free_slots.pop())
            # At least the last prompt token is computed: somebody must have its query.
            while (len(r.pages) + 1) * self.page_size < request.input_len:
                page = self.pool.share(self._content(r, len(r.pages)))
                if page is None:
                    break
                self._add_page(r, page)
            r.num_cached = len(r.pages) * self.page_size
            r.num_published = len(r.pages)
            self.num_shared_tokens += r.num_cached
            self.running.append(r)

    def _grow(self, r, scheduled):
        """Pages for r's new tokens; preempts the last admitted where none are left."""
        while len(r.pages) * self.page_size < r.num_cached + r.num_new:
            if self.pool.num_free == 0:
                victim = next(x for x in reversed(self.running) if x not in scheduled or x is r)
                self._leave(victim)
                self.waiting.appendleft((victim.index, victim.request))
                self.num_preempted += 1
                if victim is r:
                    return False
                continue
            self._add_page(r, self.pool.take())
        return True

    def _add_page(self, r, page):
        self.block_table[r.slot, len(r.pages)] = page
        r.pages.append(page)

    def _leave(self, r):
        for page in r.pages:
            self.pool.release(page)
        self.running.remove(r)
        self.free_slots.append(r.slot)

    def _content(self, r, page_index):
        """What page `page_index` of the prompt holds, or None if that is known to nobody else."""
        end = (page_index + 1) * self.page_size
        if not r.request.block_tokens or end > r.request.input_len:
            return None
        # An id stands for its block and for all before it.
        return page_index, r.request.hash_ids[(end - 1) // r.request.block_tokens]

    def _publish(self, r):
        while (r.num_published + 1) * self.page_size <= min(r.num_cached, r.request.input_len):
            key = self._content(r, r.num_published)
            if key is not None:
                self.pool.publish(r.pages[r.num_published], key)
            r.num_published += 1

    def _arrays(self, scheduled):
        num_new = np.array([r.num_new for r in scheduled], np.int32)
        cached = np.array([r.num_cached for r in scheduled], np.int32)
        qo_indptr = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(num_new, out=qo_indptr[1:])
        batch_indices = np.repeat(np.arange(len(scheduled), dtype=np.int32), num_new)
        positions = np.arange(qo_indptr[-1], dtype=np.int32) + np.repeat(
            cached - qo_indptr[:-1], num_new
        )
        return Step(
            scheduled,
            qo_indptr,
            cached + num_new,
            np.array([r.slot for r in scheduled], np.int32),
            batch_indices,
            positions,
            self.block_table,
        )

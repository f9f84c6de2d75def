"""The pages of a KV cache: counted references, and shared prefixes found again by content.

A page whose tokens are known by content (hash_ids of a trace) may be shared once it is full. A page
that nobody refers to is free, yet keeps its content until it is taken for something else.
"""

from collections import OrderedDict


class PagePool:
    def __init__(self, num_pages):
        self._refs = [0] * num_pages
        self._content = [None] * num_pages  # page -> key
        self._by_content = {}  # key -> page
        self._free = OrderedDict.fromkeys(range(num_pages))  # the least lately freed first
        self.num_pages = num_pages

    @property
    def num_free(self):
        return len(self._free)

    @property
    def num_shared(self):
        return sum(refs > 1 for refs in self._refs)

    def take(self):
        """A page for new content. The pool must have one free."""
        page, _ = self._free.popitem(last=False)
        self._by_content.pop(self._content[page], None)
        self._content[page] = None
        self._refs[page] = 1
        return page

    def share(self, key):
        """The page that holds the content `key`, with one more reference; None if there is none."""
        page = self._by_content.get(key)
        if page is not None:
            self._free.pop(page, None)
            self._refs[page] += 1
        return page

    def publish(self, page, key):
        """`page` is full and holds the content `key`: later requests may share it."""
        if key not in self._by_content:
            self._by_content[key] = page
            self._content[page] = key

    def release(self, page):
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free[page] = None

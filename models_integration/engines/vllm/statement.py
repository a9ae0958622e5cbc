"""Statement of spec/witness.md about one answer, which grows while vLLM generates the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spec.witness import FORMAT

__all__ = ["KEY", "MOST_RANGES", "Statement"]

KEY = "kvspec"
"""Key of kvspec's arguments in `extra_args`, `vllm_xargs` and `additional_config`, and of statements in answers."""
MOST_RANGES = 200_000
"""Largest number of ranges in a statement. The first eviction is always listed."""


@dataclass
class Statement:
    """Statement about one answer.

    The scheduler sends messages (`news`), which can have these keys:

    - `policy`, `budget`: only in the first message of a request.
    - `evictions`: new evictions. Each eviction is carried out before the next token of the request is processed.
    - `reason`: why no tokens were evicted. `failed`: why no more tokens are evicted.
    - `freed_blocks`: number of blocks that the request no longer holds after the last evictions.

    Attributes:
        body: JSON object of spec/witness.md.
        digests: digests of all listed evictions.
        freed_blocks: number of blocks that the request no longer holds after evictions.
        evicted: number of tokens that each set lacks.
        finished: True if the answer has ended.
    """

    body: dict[str, Any] = field(default_factory=lambda: {"witness": FORMAT, "positions": "kept", "evictions": []})
    digests: list[str] = field(default_factory=list)
    freed_blocks: int = 0
    evicted: int = 0
    finished: bool = False
    _reason: str = "the request ended before its decision"
    _ranges: int = 0

    def take(self, news: Mapping[str, Any], finished: bool) -> None:
        """Add the messages that arrived with a token. After the last token (`finished`), no token is processed."""
        self.body |= {key: news[key] for key in ("policy", "budget") if key in news}
        self._reason = news.get("reason", self._reason)
        self.freed_blocks += news.get("freed_blocks", 0)
        if finished and news.get("evictions"):
            self._reason = "no token was processed after the decision"
        elif "until" not in self.body:
            for one in news.get("evictions", ()):
                self._add(one)
        if "failed" in news:
            self.body["reason"] = news["failed"]
        if finished:
            self._finish()

    def _add(self, one: dict[str, Any]) -> None:
        self._ranges += sum(map(len, one["sets"]))
        if self.body["evictions"] and self._ranges > MOST_RANGES:
            self.body["until"] = one["seen"]
            return
        self.body["evictions"].append(one)
        self.digests.append(one["digest"])
        self.evicted = one["seen"] - sum(end - first for first, end in one["sets"][0])

    def _finish(self) -> None:
        self.finished = True
        if not self.body["evictions"]:
            self.body.setdefault("reason", self._reason)

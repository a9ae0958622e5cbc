"""Cache manager that gives evicted requests fewer blocks, and never hashes a block of an evicted request."""

from dataclasses import dataclass, fields
from typing import Any

from models_integration.engines.vllm.plan import Compaction, Plan
from models_integration.engines.vllm.seams import FullAttentionManager, FullAttentionSpec, spec_registry

__all__ = ["EvictingManager", "EvictingSpec", "evicting_spec"]


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Cache of a full-attention layer from which tokens can be evicted."""


class EvictingManager(FullAttentionManager):
    """Manager of the blocks of all requests."""

    plans: dict[str, Plan]  # plan of each request with a policy; the scheduler sets and changes the plans

    def _slots(self, request_id: str, tokens: int) -> int:
        plan = self.plans.get(request_id)
        return tokens if plan is None else plan.slots(tokens)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, apply_admission_cap: bool = False, **kwargs: Any,
    ) -> int:
        plan = self.plans.get(request_id)
        slots = plan.peak(num_tokens) if apply_admission_cap and plan else self._slots(request_id, num_tokens)
        lacks: int = super().get_num_blocks_to_allocate(
            request_id, slots, *args, apply_admission_cap=apply_admission_cap, **kwargs
        )
        return lacks

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        return super().allocate_new_blocks(request_id, self._slots(request_id, num_tokens), *args, **kwargs)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        plan = self.plans.get(request.request_id)
        if plan is None or not plan.shift:  # the slots of an evicted request are not its positions
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        if request_id in self.plans:
            self.plans[request_id].restart()
        return super().pop_blocks_for_free(request_id)

    def compact(self, request_id: str, event: int, kept: int) -> Compaction | None:
        """Exchange the blocks of a request for private blocks, and return all other blocks to the pool.

        Returns:
            Job for the worker, or None if blocks are lacking. Then nothing has changed.
        """
        pool, source = self.block_pool, self.req_to_blocks[request_id]
        assert len(source) * self.block_size >= event - self.plans[request_id].shift, "more slots than blocks"
        need = -(-kept // self.block_size)
        unshared = [block for block in source if block.ref_cnt == 1]
        target = [block for block in unshared if block.block_hash is None][:need]
        taken = pool.get_new_blocks(max(0, min(need - len(target), pool.get_num_free_blocks())))
        target += taken
        # Last resort: blocks that only this request uses, and that prefix caching knows.
        spare = [block for block in unshared if block not in target][: need - len(target)]
        if len(target) + len(spare) < need:
            pool.free_blocks(reversed(taken))
            return None
        if spare:
            pool.evict_blocks({block.block_id for block in spare})
            target += spare
        assert all(block.ref_cnt == 1 and block.block_hash is None for block in target), "a shared or hashed block"
        assert len({block.block_id for block in target}) == need
        held = {block.block_id for block in target}
        ids = tuple(block.block_id for block in source), tuple(block.block_id for block in target)
        pool.free_blocks([block for block in reversed(source) if block.block_id not in held])
        self.req_to_blocks[request_id] = target
        self.plans[request_id].carry_out(event, kept)
        return Compaction(request_id, event, kept, *ids)


def evicting_spec(spec: Any) -> Any:
    """Return the spec of a full-attention layer as an EvictingSpec, and any other spec unchanged."""
    if type(spec) is not FullAttentionSpec:
        return spec
    return EvictingSpec(**{one.name: getattr(spec, one.name) for one in fields(spec) if one.init})


spec_registry().register(EvictingSpec, manager_class=EvictingManager, uniform_type_base_spec=FullAttentionSpec)

"""Draws states of a pool for the tests of the planner and its checks."""

from __future__ import annotations

from hypothesis import strategies as st

from headrace.trainers.pool.state.plan import Grant, PoolState, Priority, Request, TenantMap, TenantState


def tenant_map(name: str, gpus: range | tuple[int, ...], tp: int, num_train: int, weight: float = 1.0) -> TenantMap:
    """Return the map of a tenant with an engine on every `tp` of `gpus`, which trains on the first `num_train`."""
    shards = tuple(tuple(gpus[i : i + tp]) for i in range(0, len(gpus) - tp + 1, tp))
    return TenantMap(name, weight, tuple(gpus[:num_train]), shards)


def equal_tenants(num_gpus: int, names: str = "ab", **changes: object) -> PoolState:
    """Return a pool of idle GPUs in which all tenants may use every GPU, one GPU an engine, with 100 groups left."""
    state = {"remaining": 100, "estimate": 100, **changes}
    tenants = {name: TenantState(tenant_map(name, range(num_gpus), 1, num_gpus // 2), **state) for name in names}
    return PoolState(num_gpus, tenants)


@st.composite
def pool_states(draw: st.DrawFn) -> PoolState:
    """Draw a state that keeps the rules. It has up to five tenants, engines of 1, 2 and 4 GPUs, some of them awake,
    some train ranks granted, and some requests."""
    num_gpus = draw(st.integers(2, 6)) * 4
    free = set(range(num_gpus))
    tenants, grants, requests = {}, [], []
    for number in range(draw(st.integers(1, 5))):
        name = f"t{number}"
        tp = draw(st.sampled_from([1, 2, 4]))
        begin = 4 * draw(st.integers(0, num_gpus // 4 - 2))
        size = 4 * draw(st.integers(2, (num_gpus - begin) // 4))
        own = tenant_map(name, range(begin, begin + size), tp, 4, draw(st.sampled_from([0.5, 1.0, 3.0])))
        train = draw(st.sampled_from(["off", "waits", "granted"]))
        if train == "granted" and free.issuperset(own.train_gpus):
            grants.append(Grant(name, "train", Priority.TRAINING, own.train_gpus))
            free.difference_update(own.train_gpus)
        elif train == "waits":
            requests.append(Request(name, "train", Priority.TRAINING, float(draw(st.integers(0, 100)))))
        awake = set()
        for shard, gpus in enumerate(own.shards):
            if free.issuperset(gpus) and draw(st.booleans()):
                awake.add(shard)
                free.difference_update(gpus)
        groups = st.none() | st.integers(0, 1000)
        tenants[name] = TenantState(
            own, frozenset(awake), draw(groups), draw(groups), generates=bool(awake),
            ending=draw(st.integers(0, 5)) == 0,
        )  # fmt: skip
    blocked = frozenset(sorted(free)[: draw(st.integers(0, 2))])
    return PoolState(num_gpus, tenants, tuple(grants), tuple(requests), 100.0, blocked)

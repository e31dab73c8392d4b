"""A second simulator, as simple and slow as can be: it shares its inputs with bml.lab.flows, and no more."""

from math import inf


def max_min(paths, capacity):
    """Rates of connections with these paths over links: raise all together, and stop those at full links."""
    rate = [0.0] * len(paths)
    rising = set(range(len(paths)))
    while rising:
        room = {}
        for link, whole in enumerate(capacity):
            through = [at for at in range(len(paths)) if link in paths[at]]
            if any(at in rising for at in through):
                used = sum(rate[at] for at in through)
                room[link] = (whole - used) / sum(at in rising for at in through)
        step = min(room.values())
        for at in rising:
            rate[at] += step
        full = {link for link, left in room.items() if left <= step * (1 + 1e-9) + 1e-12 * capacity[link]}
        rising -= {at for at in rising if full & set(paths[at])}
    return rate


def arrivals(connection, nbytes, priority, before, paths, capacity, delay):
    """When each transfer arrives. `before[t]` are those that it waits for; connection -1 takes no time."""
    n = len(nbytes)
    arrived, ready, sending, left, landing, now = {}, {}, {}, {}, {}, 0.0
    times = 0
    while len(arrived) < n:
        times, settled = times + 1, False
        while not settled:
            settled = True
            for t in [t for t, when in sorted(landing.items()) if when <= now * (1 + 1e-10)]:
                arrived[t] = landing.pop(t)
                settled = False
            for t in range(n):
                waits = t not in arrived and t not in ready and t not in landing and t not in sending.values()
                if waits and all(b in arrived for b in before[t]):
                    settled = False
                    if connection[t] < 0:
                        arrived[t] = max([0.0, *(arrived[b] for b in before[t])])
                    else:
                        ready[t] = times
        for c in range(len(paths)):
            mine = [t for t in ready if connection[t] == c]
            if c not in sending and mine:
                chosen = min(mine, key=lambda t: (priority[t], ready[t], t))
                del ready[chosen]
                sending[c], left[c] = chosen, nbytes[chosen]
        busy = sorted(sending)
        rate = dict(zip(busy, max_min([paths[c] for c in busy], capacity), strict=True))
        ends = {c: now + left[c] / rate[c] for c in busy}
        then = min([inf, *ends.values(), *landing.values()])
        assert len(arrived) == n or then < inf
        for c in busy:
            left[c] -= rate[c] * (then - now)
            if ends[c] <= then * (1 + 1e-10):
                landing[sending.pop(c)] = then + delay
        now = then if then < inf else now
    return [arrived[t] for t in range(n)]

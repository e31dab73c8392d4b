"""Run by the system's Python, which has SimGrid: takes cases in JSON, prints when transfers arrive.

Every connection is an actor that sends its transfers in order; one waits for its predecessors by semaphores.
"""

import json
import os
import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, Semaphore

SETTINGS = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "network/weight-S:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "maxmin/precision:1e-12",
    "surf/precision:1e-12",
)


def simulate(case):
    engine = Engine(["runner", "--log=root.thres:critical", *(f"--cfg={each}" for each in SETTINGS)])
    zone = NetZone.create_full_zone("all")
    links = [
        zone.create_link(f"l{at}", capacity).set_latency(0).seal()
        for at, capacity in enumerate(case["capacity"])
    ]
    hosts = []
    for at, path in enumerate(case["paths"]):
        pair = [zone.create_host(f"{side}{at}", 1e9).seal() for side in "ab"]
        zone.add_route(
            pair[0].netpoint, pair[1].netpoint, None, None, [LinkInRoute(links[link]) for link in path], False
        )
        hosts.append(pair)
    zone.seal()
    arrived = [0.0] * len(case["nbytes"])
    done = [Semaphore(0) for _ in arrived]
    after = [sum(t in waits for waits in case["before"]) for t in range(len(arrived))]

    def send(at):
        for t in [t for t, c in enumerate(case["connection"]) if c == at]:
            for before in case["before"][t]:
                done[before].acquire()
            Mailbox.by_name(f"m{at}").put(t, round(case["scale"] * case["nbytes"][t]))

    def receive(at):
        for _ in range(case["connection"].count(at)):
            t = Mailbox.by_name(f"m{at}").get()
            arrived[t] = Engine.clock
            for _ in range(after[t]):
                done[t].release()

    for at, (source, target) in enumerate(hosts):
        Actor.create(f"s{at}", source, send, at)
        Actor.create(f"r{at}", target, receive, at)
    engine.run()
    return arrived


def forked(case):
    """Simulate in a process of its own, as there can be one engine in each."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(simulate(case)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


print(json.dumps([forked(case) for case in json.load(sys.stdin)]))

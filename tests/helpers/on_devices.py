"""A sweep of tiny runs laid out over devices: `python -m tests.helpers.on_devices MESH [...]`.

Prints a line of JSON with the outputs of every run. With more arguments (coordinator, number of
processes, place of this one) it is one process of several, each with its share of the devices.
"""

import json
import sys

import jax
import numpy as np

from jaxfedmvc import data, engine
from jaxfedmvc.engine import batching, mesh

N_SAMPLES, SEEDS, ROUNDS = 64, 2, 2
SCALES = (0.3, 0.7)


def source(dealt):
    """Four clients with both views, and four with the second."""
    rng = np.random.default_rng(0)
    truth = np.arange(N_SAMPLES) % 2
    views = [
        (2 * rng.normal(size=(2, d))[truth] + rng.normal(size=(N_SAMPLES, d))).astype(np.float32)
        for d in (3, 2)
    ]
    partitions = []
    for seed in range(SEEDS):
        ids = np.random.default_rng(seed).permutation(N_SAMPLES).reshape(2, 4, -1)
        clients = np.arange(8).reshape(2, 4)
        kinds = zip(((0, 1), (1,)), ids, clients, strict=True)
        partitions.append([data.Part(*part) for part in kinds])
    return batching.pooled(views, truth, partitions, dealt=dealt)


def one_run(scale, key, federation):
    """The toy has every kind of exchange, and noise from every key in what it ends with."""
    from tests.engine.test_run import toy  # makes keys when imported: devices must be there before

    result = engine.run(toy(scale), federation, key, ROUNDS, n_clusters=2)
    center = result.state.server["center"]
    return {"center": center, "tables": result.tables, "labels": result.labels}


def outputs(devices, dealt):
    """Of every scale with every seed."""
    arranged = source(dealt)
    shared, by_seed = batching.place(arranged, devices)
    runs = [(scale, seed) for scale in SCALES for seed in range(SEEDS)]
    scales, seeds = (np.array(x) for x in zip(*runs, strict=True))
    arguments = scales.astype(np.float32), seeds.astype(np.int32), seeds.astype(np.int32)
    where = {}
    if devices is not None:
        arguments = mesh.put(arguments, mesh.sharding(devices, "sweep"))
        where = {"out_shardings": mesh.sharding(devices)}
    program = jax.jit(batching.batched(one_run, arranged.build, devices), **where)
    return jax.device_get(program(shared, by_seed, *arguments)), by_seed


def main():
    """See above."""
    sizes = mesh.parse_mesh(sys.argv[1])
    n_processes = int(sys.argv[3]) if len(sys.argv) > 2 else 1
    jax.config.update("jax_num_cpu_devices", int(np.prod(list(sizes.values()))) // n_processes)
    if n_processes > 1:
        jax.distributed.initialize(sys.argv[2], n_processes, int(sys.argv[4]))
    found, by_seed = outputs(mesh.make_mesh(sizes), dealt=sizes.get("clients", 1) > 1)
    held = [x.sharding.num_devices for x in jax.tree.leaves(by_seed)]
    mine = [sum(s.data.nbytes for s in x.addressable_shards) for x in jax.tree.leaves(by_seed)]
    whole = [x.nbytes for x in jax.tree.leaves(by_seed)]
    results = {
        "center": found["center"].tolist(),
        "tables": found["tables"].tolist(),
        "labels": [x.tolist() for x in found["labels"]],
        "devices": min(held),
        "share": sum(mine) / sum(whole),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()

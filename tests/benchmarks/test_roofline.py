"""What a compiled program does, read off its text, against XLA's account and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import roofline
from benchmarks.roofline import Work, added, chip_of, work_of
from jaxfedmvc import data
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.networks import init_models
from jaxfedmvc.algorithms.fmcsc.training import fit_copies, fit_multi_view
from jaxfedmvc.federation import Federation

KEY = jax.random.key(0)
ADAM = optax.adam(1e-3)
PARAMS = [jnp.ones((64, 128)), jnp.ones((128, 32)), jnp.ones((32, 64))]
X = jnp.ones((256, 64))


def step(params, state, x):
    def loss(params):
        h = x
        for weights in params[:-1]:
            h = jax.nn.relu(h @ weights)
        return jnp.mean((h @ params[-1] - x) ** 2)

    updates, state = ADAM.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, updates), state


def scanned(params, state, x):
    return jax.lax.scan(lambda c, _: (step(*c, x), None), (params, state), None, length=7)[0]


def unrolled(params, state, x):
    for _ in range(7):
        params, state = step(params, state, x)
    return params, state


def compiled(function):
    return jax.jit(function).lower(PARAMS, ADAM.init(PARAMS), X).compile()


def test_without_loops_it_is_xlas_account():
    program = compiled(unrolled)
    work, account = work_of(program.as_text()), program.cost_analysis()
    assert work.flops == pytest.approx(account["flops"], rel=0.02)
    assert work.bytes == pytest.approx(account["bytes accessed"], rel=0.05)
    assert work.guessed == 0


def test_a_loop_is_as_much_work_as_its_passes_one_by_one():
    program, one_by_one = compiled(scanned), work_of(compiled(unrolled).as_text())
    work = work_of(program.as_text())
    assert program.cost_analysis()["flops"] < one_by_one.flops / 6  # XLA counts the body once
    assert work.flops == pytest.approx(one_by_one.flops, rel=0.05)
    assert work.bytes == pytest.approx(one_by_one.bytes, rel=0.15)
    assert work.guessed == 0


def test_rows_that_a_loop_stacks_are_no_more_than_what_is_written():
    def stacked(x):
        return jax.lax.scan(lambda c, _: (c + 1, c * 2), x, None, length=1000)[1]

    x = jnp.zeros(1000)
    work = work_of(jax.jit(stacked).lower(x).compile().as_text())
    # A pass reads and writes a few rows of 4 kB, and not the 4 MB of all.
    assert 8e6 < work.bytes < 40e6


def test_loops_that_data_end_are_guessed():
    def program(x):
        return jax.lax.while_loop(lambda s: jnp.sum(s) > 1e-3, lambda s: s @ X.T @ X, x)

    text = jax.jit(program).lower(jnp.ones((64, 64))).compile().as_text()
    few, many = work_of(text, 10), work_of(text, 20)
    assert few.guessed == many.guessed == 1
    assert many.flops == pytest.approx(2 * few.flops, rel=0.05)
    assert few.flops == pytest.approx(10 * 2 * 2 * 64 * 64 * 256, rel=0.05)


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_branches_the_larger_counts(turned):
    def branch(n):
        return lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=n)[0]

    few, many = branch(3), branch(30)
    first, second = (many, few) if turned else (few, many)

    def program(x):
        return jax.lax.cond(jnp.sum(x) > 0, first, second, x)

    text = jax.jit(program).lower(jnp.ones((32, 32))).compile().as_text()
    assert "conditional(" in text
    assert work_of(text).flops == pytest.approx(30 * 2 * 32**3, rel=0.02)


# As a GPU's compiler writes it: a product of its library, and one that it fused itself.
GPU = """HloModule jit_f, is_scheduled=true

%gemm_computation (p0: f32[128,64], p1: f32[64,32]) -> f32[128,32] {
  %p0 = f32[128,64]{1,0} parameter(0)
  %p1 = f32[64,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[128,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[128,64], b: f32[64,32]) -> f32[128,32] {
  %a = f32[128,64]{1,0} parameter(0)
  %b = f32[64,32]{1,0} parameter(1)
  %custom-call.1 = (f32[128,32]{1,0}, s8[4096]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
  %get-tuple-element.1 = f32[128,32]{1,0} get-tuple-element(%custom-call.1), index=0
  ROOT %fusion.1 = f32[128,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_computation
}
"""


def test_products_of_a_gpus_library_are_counted():
    work, product = work_of(GPU), 2 * 128 * 64 * 32
    arrays = 4 * (128 * 64 + 64 * 32 + 128 * 32)
    assert work == Work(2 * product, 2 * arrays, 2)  # a workspace is room and no traffic


# Of GPUs too: a CPU's compiler makes loops of scatters, and calls other libraries.
SCATTER = """HloModule jit_f

%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}

ENTRY %main (a: f32[1000,8], b: s32[5], c: f32[5,8], l: f32[64,64]) -> f32[64,64] {
  %a = f32[1000,8]{1,0} parameter(0)
  %b = s32[5]{0} parameter(1)
  %c = f32[5,8]{1,0} parameter(2)
  %l = f32[64,64]{1,0} parameter(3)
  %scatter.1 = f32[1000,8]{1,0} scatter(%a, %b, %c), to_apply=%add
  ROOT %solve.1 = f32[64,64]{1,0} custom-call(%l, %l), \
custom_call_target="__cublas$triangularSolve"
}
"""


def test_a_scatter_is_as_much_work_as_its_updates_and_solving_is_some():
    assert work_of(SCATTER) == Work(5 * 8 + 64**3, 4 * (3 * 5 * 8 + 3 * 64 * 64), 2)


def test_the_binding_limit():
    work = Work(flops=6.0, bytes=4.0, kernels=10)
    assert work.least_seconds(peak=1.0, bandwidth=1.0, launch=0.1) == (6.0, "compute")
    assert work.least_seconds(peak=10.0, bandwidth=1.0, launch=0.1) == (4.0, "memory")
    assert work.least_seconds(peak=10.0, bandwidth=10.0, launch=0.1) == (1.0, "launches")
    assert added([work, work.times(2)]) == work.times(3)
    assert added([]) == Work()


def test_bad_input_names_itself():
    with pytest.raises(ValueError, match="text: got no ENTRY"):
        work_of("")
    for text in ("H200", "H200:1:2:3", "H200:1:2:3:x", "H200:1:2:3:0"):
        with pytest.raises(ValueError, match=f"chips: got '{text}'; allowed is name"):
            chip_of(text)
    assert chip_of("H100:67:495:989:3.35").bandwidth == pytest.approx(3.35e12)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["local_kmeans", pytest.param("coreset_kmeans", marks=pytest.mark.slow)]
)
def test_a_method_is_predicted(name):
    chips = [chip_of("A:1:2:3:1"), chip_of("B:2:4:6:2")]
    row = roofline.predicted(name, chips, 1e-6, samples=48, dim=6, clients=4, clusters=3)
    assert row["flops"] > row["flops_once"] > 0
    assert row["bytes"] > 0 and row["kernels"] > 0 and row["cuda_lines"] > 0
    assert row["A float32 s"] >= row["B tf32 s"] > 0
    assert {row[f"{c} float32 limit"] for c in "AB"} <= {"compute", "memory", "launches"}
    assert row["host_calls"] == 0


@pytest.mark.slow
def test_stacked_views_train_as_they_do_apart_in_fewer_kernels():
    """Steps of FMCSC's rounds; kernels are counts, which no busy machine can move."""
    rng, steps = np.random.default_rng(0), 100
    views = [rng.random((16, 6), np.float32) for _ in range(2)]
    partition = data.hybrid_partition(0, 16, 2, 1, ratio=(1, 0))
    federation = Federation.from_arrays(views, partition=partition)
    client = jax.tree.map(lambda x: x[0], federation.cohorts[0])
    kinds = [(0,), (1,), (0, 1)]
    kernels, trained = [], []
    for stack in (False, True):
        config = FMCSCConfig(
            3, hidden=(7,), latent_dim=4, head_hidden=5, batch_size=16, stack_views=stack
        )
        models = init_models(jax.random.key(0), config, (6, 6), kinds)

        def fit(key, models, client, config=config):
            hyper, target = FMCSCHyperparams(), client.views[0][:, :4]
            full, copies = models[0, 1], {kind: models[kind] for kind in kinds[:2]}
            own = fit_multi_view(config, hyper, key, full, client, steps)
            return own, fit_copies(config, hyper, key, copies, target, client, steps)

        program = roofline.quickly_compiled(jax.jit(fit).trace(KEY, models, client))
        kernels.append(work_of(program.as_text()).kernels)
        trained.append(program(KEY, models, client))
    assert kernels[1] < 0.65 * kernels[0]
    assert jax.tree.structure(trained[1]) == jax.tree.structure(trained[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), *trained)

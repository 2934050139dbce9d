"""FLOPs of FMCSC's steps from shapes against those of the compiled steps."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.fmcsc import head_flops, step_flops
from benchmarks.roofline import work_of
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig
from jaxfedmvc.algorithms.fmcsc.networks import features, init_model
from jaxfedmvc.algorithms.fmcsc.objective import multi_view_loss, reconstruction_loss

N, D, LATENT = 64, 150, 20
CONFIG = FMCSCConfig(10, hidden=(100, 200), latent_dim=LATENT)
STEP = 2 * step_flops(CONFIG, D, N)
HEADS = head_flops(CONFIG, 2 * LATENT, N) + 2 * head_flops(CONFIG, LATENT, N)
CONTRAST = 2 * 6.0 * N * N * LATENT


def pretraining(model, views):
    return reconstruction_loss(features(model, views).reconstruction, views, jnp.ones(N, bool))


def of_a_round(model, views):
    return multi_view_loss(CONFIG, 0.5, model, views, jnp.ones(N, bool))


@pytest.mark.parametrize(
    "loss, flops", [(pretraining, STEP), (of_a_round, STEP + HEADS + CONTRAST)]
)
def test_steps_are_as_much_work_as_their_shapes_say(loss, flops):
    views = dict.fromkeys((0, 1), jax.ShapeDtypeStruct((N, D), jnp.float32))
    model = jax.eval_shape(lambda key: init_model(key, CONFIG, (D, D), (0, 1)), jax.random.key(0))
    program = jax.jit(jax.grad(loss)).lower(model, views).compile()
    # All but products is little.
    assert work_of(program.as_text()).flops == pytest.approx(flops, rel=0.03)

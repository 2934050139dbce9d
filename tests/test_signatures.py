"""The same thing has the same name and the same place in all methods and clusterers."""

import dataclasses
import inspect
from typing import Literal

import numpy as np
import pytest

from jaxfedmvc import METHODS, checks, clustering

EMPTY = inspect.Parameter.empty
SPELLINGS = {
    "tolerance": "tol",
    "n_neighbors": "n_neighbours",
    "max_iters": "max_iter",
    "lr": "learning_rate",
    "temperature": "tau",
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_of_a_config_and_hyperparams_by_these_names(name):
    parameters = inspect.signature(METHODS[name].make).parameters
    assert list(parameters)[:2] == ["config", "hyperparams"]
    assert parameters["hyperparams"].default is None
    assert all(p.default is not EMPTY for p in list(parameters.values())[2:])


@pytest.mark.parametrize("name", METHODS)
def test_settings_have_one_spelling(name):
    kinds = (METHODS[name].config, METHODS[name].hyperparams)
    settings = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    for other, ours in SPELLINGS.items():
        assert other not in settings, f"{other} is called {ours} by all methods"
    # "learning_rate" is that of the whole training, "<stage>_rate" that of one stage.
    assert {s for s in settings if s.endswith("learning_rate")} <= {"learning_rate"}


def made(name, **settings):
    """Makes a method with these fields, whose others are defaults."""
    method = METHODS[name]
    fields = {field.name for field in dataclasses.fields(method.config)}
    given = {"n_clusters": 3, "n_clients": 3, "rounds": 2} | settings
    config = method.config(**{key: x for key, x in given.items() if key in fields})
    hyperparams = {key: x for key, x in settings.items() if key not in fields}
    return method.make(config, method.hyperparams(**hyperparams))


@pytest.mark.parametrize("name", METHODS)
def test_no_setting_is_complex(name):
    made(name)
    for field in dataclasses.fields(METHODS[name].hyperparams):
        with pytest.raises(ValueError, match=f"^{field.name}( |:)"):
            made(name, **{field.name: 1j})


@pytest.mark.parametrize(
    "name, setting",
    [
        ("mgcd", "memory_limit"),
        ("dpfmps", "dp_epsilon"),
        ("comvc", "negatives"),
        ("fedhk_parafac2", "rank"),
        ("fmcsc", "components"),
    ],
)
def test_numbers_and_letters_of_configs_are_such(name, setting):
    for value in (-3, [1]):
        with pytest.raises(ValueError, match=f"^{setting}: got"):
            made(name, **{setting: value})


@pytest.mark.parametrize("name", METHODS)
def test_switches_are_true_or_false_and_lists_are_lists(name):
    """The word "no" would be true."""
    for field in dataclasses.fields(METHODS[name].config):
        # A string where the module begins with `from __future__ import annotations`.
        kind = field.type
        annotation = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        if annotation in ("bool", "bool | None"):
            for value in ("no", 2.0, [1]):
                with pytest.raises(ValueError, match=f"^{field.name}: got .* True or False"):
                    made(name, **{field.name: value})
        if annotation.startswith("tuple"):
            with pytest.raises(ValueError, match=f"^{field.name}: got 3"):
                made(name, **{field.name: 3})


@dataclasses.dataclass
class Optional:
    word: Literal["a", "b"] | None = None
    switch: bool | None = None
    names: tuple[str, ...] | None = None
    number_or_word: int | Literal["auto"] | None = None


@pytest.mark.parametrize(
    ("setting", "right", "allowed"),
    [
        ("word", ["a", "b"], "'a' or 'b', or None"),
        ("switch", [True, np.False_], "True or False, or None"),
        ("names", [("x",), []], "a tuple, or None"),
        ("number_or_word", [3, "auto", 1.5], None),  # their class knows which goes with what
    ],
)
def test_what_may_be_none_is_checked_where_it_is_not(setting, right, allowed):
    for value in [None, *right]:
        checks.choices(Optional(**{setting: value}))
    if allowed is not None:
        with pytest.raises(ValueError, match=f"^{setting}: got 1.5; allowed is {allowed}$"):
            checks.choices(Optional(**{setting: 1.5}))


@pytest.mark.parametrize("name", sorted(set(clustering.__all__) - {"KMeansResult"}))
def test_what_a_clusterer_may_be_told_beside_its_data_goes_by_name(name):
    parameters = inspect.signature(getattr(clustering, name)).parameters.values()
    optional = [p for p in parameters if p.default is not EMPTY]
    assert {p.kind for p in optional} == {inspect.Parameter.KEYWORD_ONLY}

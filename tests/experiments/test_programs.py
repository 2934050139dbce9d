"""Long jobs let go of their programs before the process has no memory maps left."""

from unittest import mock

import jax

from experiments.lib import programs


def test_programs_go_where_maps_run_out_and_stay_otherwise():
    compiled = jax.jit(lambda x: x + 1)
    assert compiled(1) == 2 and compiled._cache_size() == 1
    programs.make_room()
    assert compiled._cache_size() == 1
    with mock.patch.object(programs, "_MANY", 0):
        assert programs.many_maps() == programs._MAPS.exists()
        programs.make_room()
    assert compiled._cache_size() == (0 if programs._MAPS.exists() else 1)
    assert compiled(1) == 2

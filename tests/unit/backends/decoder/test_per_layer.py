from types import SimpleNamespace

from rftmega.backends.decoder.per_layer import numbers_in


class PerLayer:
    """A config that refuses to give one number for several, as transformers does for Gemma 4."""

    per_layer_config = (SimpleNamespace(heads=4), SimpleNamespace(heads=3), SimpleNamespace())

    @property
    def heads(self) -> int:
        raise RuntimeError("ambiguous")


def test_a_field_that_differs_between_layers_has_all_its_numbers() -> None:
    assert numbers_in(PerLayer(), "heads") == {3, 4}
    assert numbers_in(SimpleNamespace(heads=5), "heads") == {5}
    assert numbers_in(SimpleNamespace(heads=0), "heads") == set()
    assert numbers_in(SimpleNamespace(), "heads") == set()

"""Errors suggest what was meant: by other names first, then by letters."""

import pytest

from spheret.connections import OTHER_NAMES, SCHEMES, scheme
from spheret.connections.parse import parse_schemes
from spheret.support.errors import unknown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("Pre_Norm", "pre-ln"), ("SpheretNorm", "proj-spheretnorm"),
        # by letters
        ("geonrm", "geonorm"),
    ],
)  # fmt: skip
def test_the_scheme_that_is_meant(given, meant):
    for ask in (scheme, parse_schemes):
        with pytest.raises(ValueError, match=f"'{given}'.*'{meant}'"):
            ask(given)


def test_every_other_name_is_found_and_none_is_a_scheme():
    plain = {name.replace("-", ""): name for name in SCHEMES}
    for other, meant in OTHER_NAMES.items():
        assert meant in SCHEMES
        # a scheme without its dashes is that scheme
        assert plain.get(other, meant) == meant
        assert f"Did you mean '{meant}'?" in str(unknown("scheme", other.upper(), SCHEMES, OTHER_NAMES))
        assert other not in SCHEMES


def test_a_name_that_is_not_allowed_here_is_not_suggested():
    assert "residual" not in str(unknown("scheme", "resnet", ["pre-ln"], OTHER_NAMES))

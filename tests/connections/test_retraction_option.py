"""The options `retraction` and `p` of the spherical schemes, from Python, the command line and JSON."""

import json
import math
from dataclasses import replace

import pytest
import torch

from spheret import RETRACTIONS, GPTConfig, Retraction, angular, scheme
from spheret.connections.parse import parse_options, parse_schemes
from spheret.connections.spherical import Spherical

D = 8
TINY = {"layers": 1, "heads": 1, "width": 4, "block": 4, "vocab": 8}
OWN = Retraction.from_angle(torch.tanh, "tanh")


def update(chosen):
    return chosen.connect(D, 1, 2).norm


@pytest.mark.parametrize("name", RETRACTIONS)
@pytest.mark.parametrize("row", ["geonorm", "proj-spheretnorm", "cay-spheretnorm", "p-spheretnorm"])
def test_every_retraction_in_every_spherical_scheme(name, row):
    for retraction in (name, RETRACTIONS[name]):
        built = update(scheme(row, retraction=retraction))
        assert built.retraction is RETRACTIONS[name]
        assert built.max_angle == RETRACTIONS[name].cap


@pytest.mark.parametrize("p", [0.3, 1, 2.0, math.inf])
def test_p_is_short_for_a_number(p):
    short, long = scheme("p-spheretnorm", p=p), scheme("p-spheretnorm", retraction=p)
    assert update(short).p == update(long).p == p
    assert update(short).max_angle == update(long).max_angle == angular(p).cap


def test_the_rows_keep_their_own_p():
    ps = {"geonorm": math.inf, "proj-spheretnorm": 1.0, "cay-spheretnorm": 2.0, "p-spheretnorm": 0.5}
    assert {name: scheme(name).p for name in ps} == ps
    assert {name: replace(scheme(name), bias=False).p for name in ps} == ps
    assert scheme("geonorm").schedule == "harmonic"
    assert Spherical().p == 1.0
    assert replace(scheme("geonorm", retraction="cayley"), bias=False).retraction == "cayley"


def test_a_retraction_of_your_own():
    assert update(scheme("proj-spheretnorm", retraction=OWN)).retraction is OWN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0.3, "retraction": "cayley"}, "give p or retraction, not both, got p = 0.3 and retraction = 'cayley'"),
        (
            {"p": "orthographic"},
            "p of p-spheretnorm must be a number or none, got 'orthographic': a word goes into retraction, schedule",
        ),
        ({"p": "cayley"}, "p of p-spheretnorm must be a number or none"),
        ({"retraction": "cayly"}, "Did you mean 'cayley'"),
        ({"retraction": -1.0}, "greater than 0"),
        ({"retraction": True}, "retraction of p-spheretnorm must be a word, a number, a Retraction or none"),
        ({"retraction": OWN, "learnable_p": True}, "finite p to start from"),
        ({"default_p": 3.0}, "unknown option of p-spheretnorm 'default_p'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        scheme("p-spheretnorm", **options)


def test_the_command_line():
    assert parse_options(["retraction=cayley"]) == {"retraction": "cayley"}
    assert parse_options(["retraction=0.3"]) == {"retraction": 0.3}
    (choice,) = parse_schemes("proj-spheretnorm:retraction=exponential")
    assert update(choice.build()).retraction is RETRACTIONS["exponential"]


class TestJson:
    def config(self, retraction):
        return GPTConfig(**TINY, scheme="proj-spheretnorm", scheme_options={"retraction": retraction})

    @pytest.mark.parametrize("name", RETRACTIONS)
    def test_a_row_is_written_by_its_name(self, name):
        written = json.loads(json.dumps(self.config(RETRACTIONS[name]).as_dict()))
        assert written["scheme_options"] == {"retraction": name}
        assert GPTConfig.from_dict(written) == self.config(name)

    def test_a_number_stays(self):
        assert self.config(0.3).as_dict()["scheme_options"] == {"retraction": 0.3}

    @pytest.mark.parametrize("own", [OWN, angular(0.3)], ids=repr)
    def test_any_other_retraction_is_an_error_where_it_is_written(self, own):
        with pytest.raises(ValueError, match=r"retraction = Retraction\(.*spheret\.RETRACTIONS"):
            self.config(own).as_dict()

"""`--web` with and without a port, and commands without any word."""

import pytest

from bml.cli.web.options import with_port


@pytest.mark.parametrize("words", [[], ["--json"], ["--job", "a"]])
def test_words_without_it_stay_as_they_are(words):
    assert [*with_port(words)] == words


@pytest.mark.parametrize("words", [["--web"], ["--web", "--json"], ["--json", "--web"]])
def test_without_a_port_it_is_a_free_one(words):
    assert sorted(with_port(words)) != sorted(words)


def test_a_port_stays():
    assert [*with_port(["--web", "8000"])] == ["--web", "8000"]

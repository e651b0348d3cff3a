"""The Hypothesis profiles: what each promises, and where its failures are kept."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from attnconform.conformance.cases import profiles


@pytest.fixture(autouse=True)
def _registered_again() -> object:
    """Profiles as the environment of the whole run has them, once a test is over."""
    yield
    profiles.load_profile()


def test_pull_requests_see_the_same_examples_without_a_clock_or_a_database() -> None:
    profiles.register_profiles()
    pr = settings.get_profile("pr")
    assert pr.derandomize
    assert pr.deadline is None
    assert pr.database is None


def test_nightly_is_random_larger_and_keeps_its_failures_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(profiles.DATABASE_VARIABLE, str(tmp_path / "shared"))
    profiles.register_profiles()
    nightly = settings.get_profile("nightly")
    assert not nightly.derandomize
    assert nightly.deadline is None
    assert nightly.max_examples > settings.get_profile("pr").max_examples
    assert isinstance(nightly.database, DirectoryBasedExampleDatabase)
    nightly.database.save(b"key", b"value")
    assert list((tmp_path / "shared").rglob("*"))


def test_the_environment_picks_the_profile_and_the_number_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(profiles.PROFILE_VARIABLE, raising=False)
    assert (profiles.profile_name(), profiles.examples(10)) == ("pr", 10)
    monkeypatch.setenv(profiles.PROFILE_VARIABLE, "nightly")
    profiles.load_profile()
    assert profiles.examples(10) == 10 * profiles.NIGHTLY_FACTOR
    assert not settings().derandomize
    monkeypatch.undo()


def test_another_profile_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.PROFILE_VARIABLE, "fast")
    with pytest.raises(
        ValueError, match=r"^ATTNCONFORM_HYPOTHESIS_PROFILE is fast, but the profiles are pr and nightly$"
    ):
        profiles.profile_name()
    monkeypatch.undo()

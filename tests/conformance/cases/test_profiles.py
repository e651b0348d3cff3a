"""The Hypothesis profiles: what each promises, and where its failures are kept."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

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


@pytest.mark.parametrize("name", ["nightly", "hunt"])
def test_other_profiles_are_random_larger_and_keep_their_failures_where_they_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(profiles.DATABASE_VARIABLE, str(tmp_path / "shared"))
    profiles.register_profiles()
    profile = settings.get_profile(name)
    assert not profile.derandomize
    assert profile.deadline is None
    assert profile.max_examples > settings.get_profile("pr").max_examples
    assert isinstance(profile.database, DirectoryBasedExampleDatabase)
    profile.database.save(b"key", b"value")
    assert list((tmp_path / "shared").rglob("*"))
    monkeypatch.undo()


def test_the_hunt_has_a_phase_of_targets_and_the_largest_number_of_examples() -> None:
    profiles.register_profiles()
    hunt, nightly = settings.get_profile("hunt"), settings.get_profile("nightly")
    assert {Phase.reuse, Phase.generate, Phase.target, Phase.shrink} <= set(hunt.phases)
    assert hunt.max_examples > nightly.max_examples


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_the_environment_picks_the_profile_and_the_number_of_examples(
    monkeypatch: pytest.MonkeyPatch, name: profiles.Profile
) -> None:
    monkeypatch.setenv(profiles.PROFILE_VARIABLE, name)
    profiles.load_profile()
    assert profiles.examples(10) == 10 * profiles.FACTORS[name]
    assert profiles.is_nightly() == (name != "pr")
    assert settings().derandomize == (name == "pr")
    monkeypatch.undo()


def test_no_environment_is_a_pull_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(profiles.PROFILE_VARIABLE, raising=False)
    assert (profiles.profile_name(), profiles.examples(10)) == ("pr", 10)
    monkeypatch.undo()


def test_another_profile_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.PROFILE_VARIABLE, "fast")
    with pytest.raises(
        ValueError, match=r"^ATTNCONFORM_HYPOTHESIS_PROFILE is fast, but the profiles are pr, nightly, hunt$"
    ):
        profiles.profile_name()
    monkeypatch.undo()


def test_artifacts_of_a_repository_are_read_and_the_directory_beside_them_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(GitHubArtifactDatabase, "fetch", lambda self, key: iter((b"of last night",)))
    monkeypatch.setattr(ReadOnlyDatabase, "fetch", lambda self, key: self._wrapped.fetch(key))
    shared = profiles.database_at("github:owner/project")
    assert isinstance(shared, MultiplexedDatabase)
    shared.save(b"key", b"of today")
    assert set(shared.fetch(b"key")) == {b"of last night", b"of today"}
    assert list((tmp_path / profiles.DEFAULT_DATABASE).rglob("*"))


@pytest.mark.parametrize("place", ["github:owner", "github:/project", "github:owner/project/more", "mysql://host/1"])
def test_a_place_that_keeps_no_examples_is_refused_in_one_line(place: str) -> None:
    with pytest.raises(ValueError, match=f"^{profiles.DATABASE_VARIABLE} is {place}, but must be a directory, github:"):
        profiles.database_at(place)


def test_a_redis_without_its_package_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"is redis://host:6379/0, which needs the package redis$"):
        profiles.database_at("redis://host:6379/0")


class Sets:
    """As much of a Redis client as the database calls: sets by key, in this process."""

    def __init__(self, url: str) -> None:
        self.url, self.kept = url, {}

    @classmethod
    def from_url(cls, url: str) -> "Sets":
        if "nowhere" in url:
            raise ValueError("no such host")
        return cls(url)

    def pipeline(self) -> "Sets":
        return self

    def execute(self) -> list[object]:
        return [set(members) for members in self.kept.values()] or [set()]

    def sadd(self, key: bytes, value: bytes) -> None:
        self.kept.setdefault(key, set()).add(value)

    def smembers(self, key: bytes) -> None:
        self.kept.setdefault(key, set())

    def expire(self, *_: object) -> None: ...

    publish = expire


def test_a_redis_keeps_what_is_saved_and_a_wrong_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("redis")
    module.Redis = Sets  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "redis", module)
    monkeypatch.delitem(sys.modules, "hypothesis.extra.redis", raising=False)
    database = profiles.database_at("redis://host:6379/0")
    assert database.redis.url == "redis://host:6379/0"
    database.save(b"key", b"value")
    assert set(database.fetch(b"key")) == {b"value"}
    with pytest.raises(ValueError, match=rf"^{profiles.DATABASE_VARIABLE} is redis://nowhere: no such host$"):
        profiles.database_at("redis://nowhere")
    monkeypatch.delitem(sys.modules, "hypothesis.extra.redis", raising=False)


def test_the_hunt_goes_on_from_the_largest_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peak that chance meets once in 2^32 draws is climbed where ratios are told, and not elsewhere."""
    monkeypatch.setenv(profiles.DATABASE_VARIABLE, str(tmp_path))

    def highest(name: str) -> int:
        monkeypatch.setenv(profiles.PROFILE_VARIABLE, name)
        profiles.load_profile()
        best = 0

        @settings(max_examples=500, derandomize=True, database=None, phases=(Phase.generate, Phase.target))
        @given(st.lists(st.integers(0, 3), min_size=16, max_size=16))
        def climb(steps: list[int]) -> None:
            nonlocal best
            best = max(best, sum(step == 2 for step in steps))
            profiles.aim(sum(step == 2 for step in steps), "steps")

        climb()
        return best

    assert highest("hunt") == 16
    assert highest("pr") < 16
    monkeypatch.undo()


def test_a_ratio_outside_a_test_or_without_an_end_aims_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.PROFILE_VARIABLE, "hunt")
    profiles.aim(0.5, "outside")

    @settings(max_examples=1, database=None)
    @given(st.just(float("inf")))
    def inside(ratio: float) -> None:
        profiles.aim(ratio, "without an end")

    inside()
    monkeypatch.undo()

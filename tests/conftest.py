"""Settings of every test: four virtual CPU devices, a compilation cache, no rank promotion."""

import os
from pathlib import Path

# Before the first import of JAX, and in the environment, so that subprocesses of tests share them.
# What the user has set wins: `JAX_PLATFORMS=cuda python -m pytest -m device` runs on a GPU.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "spot-jax" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example compiles, and fixtures here are either constant or settings of JAX.
hypothesis.settings.register_profile(
    "spot",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("spot")


def pytest_collection_modifyitems(items):
    if any("device" in item.keywords for item in items) and jax.default_backend() == "cpu":
        for item in items:
            if item.get_closest_marker("device"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture(autouse=True, scope="module")
def programs():
    """Drops a module's compiled programs behind it.

    XLA maps each several times into memory, and a process has 65,530 maps (`vm.max_map_count`):
    with all programs of the suite the next one is a segmentation fault.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    """A typed random key."""
    return jax.random.key(0)


@pytest.fixture
def strict():
    """No implicit dtype promotion, and no random key used twice."""
    with jax.numpy_dtype_promotion("strict"), jax.debug_key_reuse(True):
        yield

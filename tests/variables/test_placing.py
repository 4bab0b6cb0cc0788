"""How values reach the devices: as by `jax.device_put`, sooner."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stepcache.pods.global_arrays import placed

TYPES: list = ["float32", "float64", "int64", "uint8", "bool", "complex64", "float16"]
TYPES += [ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn]
REFUSED = [">f4", object, "U3", "M8[s]", [("a", int)]]


@pytest.fixture(params=["nobody", "one device", "split", "replicated"])
def sharding(request, mesh):
    if request.param == "nobody":
        return None
    if request.param == "one device":
        return jax.sharding.SingleDeviceSharding(jax.devices()[3])
    return jax.NamedSharding(mesh, jax.P("data") if request.param == "split" else jax.P())


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("dtype", list(map(np.dtype, TYPES)), ids=str)
@pytest.mark.parametrize("may_alias", [True, None])
def test_it_is_what_device_put_makes(sharding, dtype, may_alias):
    value = np.arange(16).reshape(8, 2).astype(dtype)
    made, expected = placed(value, sharding, may_alias=may_alias), jax.device_put(value, sharding)
    assert (made.aval, made.weak_type) == (expected.aval, expected.weak_type)
    assert (made.sharding, made.committed) == (expected.sharding, expected.committed)
    assert jnp.array_equal(made, expected)


@pytest.mark.parametrize("dtype", list(map(np.dtype, REFUSED)), ids=str)
def test_what_jax_has_no_arrays_of_is_its_error(dtype):
    value = np.zeros(8, dtype)
    with pytest.raises(TypeError) as expected:
        jax.device_put(value)
    with pytest.raises(TypeError) as error:
        placed(value, None)
    assert str(error.value) == str(expected.value)


def test_what_does_not_divide_is_an_error(mesh):
    with pytest.raises(ValueError, match="divi"):
        placed(np.zeros(7, np.float32), jax.NamedSharding(mesh, jax.P("data")))


def test_it_is_on_the_default_device_of_now():
    value = np.zeros(8, np.float32)
    for device in (jax.devices()[1], jax.devices()[2]):
        with jax.default_device(device):
            assert placed(value, None).devices() == {device}


def test_it_is_an_explicit_transfer(sharding):
    with jax.transfer_guard("disallow"):
        placed(np.zeros((8, 2), np.float32), sharding)

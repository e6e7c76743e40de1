"""A run's key from a file: Ray carries a fingerprint of it, and files that others can read are refused."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.cloudpickle import cloudpickle

from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.handle import PlaneText
from headrace.dataplane.security.run_key import RunKey, fingerprint, key_error, key_from_file, packed, unpacked
from headrace.dataplane.store_choice import check_store
from headrace.testing.data_plane import fresh_run_id


def test_a_file_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: bytes(key_from_file(path, "run", tls=False)), range(16)))
    assert len(keys) == 1 and os.listdir(tmp_path) == ["key"]
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert bytes(key_from_file(path, "other run", tls=False)) not in keys


@pytest.mark.processes
def test_what_ray_would_carry_has_no_byte_of_the_key(tmp_path: Path) -> None:
    config = DataPlaneConfig(store=StoreConfig(kind="shm", capacity_mib=4), key_file=str(tmp_path / "key"))
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane:
        key, secret = bytes(plane.handle.store.key), bytes.fromhex((tmp_path / "key").read_text())
        carried = {"settings": [plane.handle, {"key": plane.handle.store.key}], "unit": (plane.handle.store.key, 1)}
        for data in (pickle.dumps(carried), cloudpickle.dumps(carried), pickle.dumps(plane.handle, 2)):
            for one in (key, secret):
                assert one not in data and one[:8] not in data and one.hex().encode() not in data
        assert fingerprint(key).encode() in pickle.dumps(carried)
        again = pickle.loads(pickle.dumps(plane.handle))
        assert again.store.key == key and key.hex() not in repr(again.store.key)
        with connect(again) as client:
            assert client.status().rows == 0
        assert PlaneText.parse(plane.handle.to_text()).key == key, "a text is a secret, with the key in it"


def test_files_that_are_no_secret_of_this_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = key_from_file(str(path), "run", tls=True)
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"dataplane.key_file: .*key on .* has mode 0640 .*, expected mode 0600"):
        key_from_file(str(path), "run", tls=True)
    path.unlink()
    data = pickle.dumps(key)
    with pytest.raises(ValueError, match="cannot be read .No such file.*expected a file that each host of the run has"):
        pickle.loads(data)  # As on a host that does not share the folder.
    assert key_error(str(path), fingerprint(key_from_file(str(path), "", tls=False))) == "", "this makes a new file"
    with pytest.raises(ValueError, match="has another key than on the host that opened the data plane"):
        pickle.loads(data)
    assert "has another key than" in key_error(str(path), fingerprint(key))
    path.write_text("not hexadecimal")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is no key, expected a file that Headrace made"):
        pickle.loads(data)
    with pytest.raises(ValueError, match="cannot be read or made .No such file"):
        key_from_file(str(tmp_path / "absent" / "key"), "run", tls=False)


def test_a_dry_run_refuses_a_path_at_which_no_key_can_be_made(tmp_path: Path) -> None:
    absent, possible = tmp_path / "absent" / "key", tmp_path / "key"
    with pytest.raises(ValueError, match=r"absent/key on .* cannot be made, expected .* unlike .*/absent$"):
        check_store(DataPlaneConfig(store=StoreConfig(kind="local"), key_file=str(absent)))
    check_store(DataPlaneConfig(store=StoreConfig(kind="local"), key_file=str(possible)))
    assert not possible.exists(), "nothing is made"


def test_a_packed_key_keeps_what_belongs_to_it() -> None:
    for key in (b"k" * 32, RunKey.make(b"k" * 32, "", "run", tls=True), RunKey.make(b"k" * 32, "f", "run", tls=False)):
        found = unpacked(packed(key))
        assert (
            found == key and type(found) is type(key) and getattr(found, "__dict__", 0) == getattr(key, "__dict__", 0)
        )


def test_encryption_needs_a_key_that_ray_does_not_carry() -> None:
    with pytest.raises(ValueError, match="got tls=true without key_file, expected key_file=PATH"):
        DataPlaneConfig(tls=True)

"""Listener of the embedded broker: TLS beyond the loopback, and complete sets of usable files."""

from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from fleetpulse.io.mqtt.embedded.broker import Broker, ListenerTls, _configuration, _listener_tls, _mappings_beside
from tests.support.refusals import refused


@pytest.fixture
def files(tmp_path: Path) -> ListenerTls:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "broker.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    broker, ca = str(tmp_path / "broker.pem"), str(tmp_path / "ca.pem")
    return ListenerTls(broker, broker, ca, ca, broker)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "broker.example"])
def test_an_unencrypted_listener_beyond_the_loopback_is_refused(host: str, tmp_path: Path) -> None:
    with refused("broker-unencrypted", match="--plain"):
        Broker(tmp_path / "broker", tmp_path / "log", host).start()
    assert not (tmp_path / "broker").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "::1"])
def test_plain_or_loopback_listeners_get_past_the_check(host: str, tmp_path: Path) -> None:
    (tmp_path / "broker").write_text("a file, so that nothing starts")
    with pytest.raises(FileExistsError):
        Broker(tmp_path / "broker", tmp_path / "log", host, plain=host == "0.0.0.0").start()


def test_configuration_contains_the_tls_files_and_maps_certificates_only_with_an_authority(files: ListenerTls) -> None:
    folder = Path("/höme")
    mapped = _configuration(folder, "0.0.0.0", 8883, "1s", files)
    assert f'cert_file: "{files.certificate}", key_file: "{files.key}"' in mapped
    assert f'ca_file: "{files.client_authority}", verify_and_map: true' in mapped
    assert 'store_dir: "/höme/store"' in mapped, "NATS does not read escapes by number"
    with_passwords = _configuration(folder, "0.0.0.0", 8883, "1s", replace(files, client_authority=""))
    assert "cert_file" in with_passwords and "ca_file" not in with_passwords and "verify" not in with_passwords
    assert "tls" not in _configuration(folder, "127.0.0.1", 1883, "1s", None)


@pytest.mark.parametrize("content", [None, "{", '{"certificate": "a"}', "[]"])
def test_a_missing_or_damaged_record_of_the_tls_files_is_reported(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tls.json").write_text(content)
    with refused("broker-tls-unknown", match="start it"):
        _listener_tls(tmp_path)


def test_a_fault_of_the_mapping_file_withdraws_no_access(tmp_path: Path) -> None:
    folder, path = tmp_path / "broker", tmp_path / "mapping.toml"
    folder.mkdir()
    path.write_text('[[mapping]]\ntopic = "tele/{device}/STATE"\nsite = "home"\nkind = "telemetry"\n')
    granted = _mappings_beside(folder).filters_of_device("plug")
    assert granted == ("tele/plug/STATE",)
    path.write_text("[[mapping]]\ntopic = ")
    assert _mappings_beside(folder).filters_of_device("plug") == granted
    path.unlink()
    assert _mappings_beside(folder).filters_of_device("plug") == ()


@pytest.mark.parametrize("content", [None, b"[", b"\xff", b"[[mapping]]"])
def test_without_a_usable_mapping_file_the_broker_has_no_mappings(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "mapping.toml").write_bytes(content)
    assert _mappings_beside(tmp_path / "broker").rules == ()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("key", "", "broker-certificate-missing"),
        ("certificate", "", "broker-certificate-missing"),
        ("own_certificate", "", "broker-own-certificate-missing"),
        ("certificate", "ca.pem", "broker-certificate-unreadable"),
        ("key", "nothing.pem", "broker-certificate-unreadable"),
        ("client_authority", "nothing.pem", "broker-certificate-unreadable"),
    ],
)
def test_incomplete_or_unusable_files_are_refused(field: str, value: str, code: str, files: ListenerTls, tmp_path: Path) -> None:
    files.check()
    with refused(code):
        replace(files, **{field: value and str(tmp_path / value)}).check()

"""Downloads from a server of our own: whole and verified, or refused with one sentence; hostile archives write nothing."""

import contextlib
import functools
import hashlib
import http.server
import io
import os
import socket
import tarfile
import threading

import numpy as np
import pytest

import patchbayes.data.reading as reading
from patchbayes.data import read
from patchbayes.data.download import Source, download, found
from patchbayes.data.sources import CIFAR10, CIFAR100, FASHION_MNIST, MNIST, UCI
from patchbayes.errors import PatchbayesError


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    """A folder, and the address under which its files are served."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def archive(members):
    """A tar.gz of (TarInfo or name, content) pairs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def served_archive(server, members, files=("a.bin", "b.txt")):
    folder, url = server
    content = archive(members)
    (folder / "set.tar.gz").write_bytes(content)
    return Source("set", files, (f"{url}/set.tar.gz",), (md5(content),))


def everything_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_an_archive_is_fetched_verified_and_unpacked(server, root):
    source = served_archive(server, [("set/a.bin", b"A" * 3_000_000), ("set/b.txt", b"B"), ("set/readme", b"C")])
    assert found(source, root) == root / "set"
    assert everything_below(root) == ["set/a.bin", "set/b.txt"]
    assert (root / "set" / "a.bin").read_bytes() == b"A" * 3_000_000
    (server[0] / "set.tar.gz").unlink()
    assert found(source, root) == root / "set"  # from now on without the server


def test_files_are_fetched_one_by_one(server, root):
    folder, url = server
    contents = {"x.gz": b"one", "y.gz": b"two"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    urls, sums = [f"{url}/{name}" for name in contents], [md5(content) for content in contents.values()]
    source = Source("set", tuple(contents), tuple(urls), tuple(sums))
    (root / "set").mkdir(parents=True)
    (root / "set" / "x").write_bytes(b"mine")  # the plain file will do, and stays
    download(source, root)
    assert everything_below(root) == ["set/x", "set/y.gz"]
    assert (root / "set" / "x").read_bytes() == b"mine"


def test_one_checksum_for_all_files_together(server, root):
    folder, url = server
    for name, content in (("p", b"12"), ("q", b"3")):
        (folder / name).write_bytes(content)
    urls = (f"{url}/p", f"{url}/q")
    right = Source("set", ("p", "q"), urls, ("sha256:" + hashlib.sha256(b"123").hexdigest(),))
    wrong = Source("set", ("p", "q"), urls, ("sha256:" + hashlib.sha256(b"132").hexdigest(),))
    with pytest.raises(PatchbayesError, match="the sha256 is"):
        download(wrong, root)
    assert everything_below(root) == []
    download(right, root)
    assert everything_below(root) == ["set/p", "set/q"]


def test_other_folders_are_looked_into_first(root, tmp_path):
    elsewhere = tmp_path / "system"
    elsewhere.mkdir()
    (elsewhere / "x").write_bytes(b"x")
    source = Source("set", ("x.gz",), ("http://127.0.0.1:9/x.gz",), (md5(b""),), elsewhere=(str(elsewhere),))
    assert found(source, root) == elsewhere


def test_a_changed_or_cut_file_is_not_kept(server, root):
    source = served_archive(server, [("set/a.bin", b"A"), ("set/b.txt", b"B")])
    whole = (server[0] / "set.tar.gz").read_bytes()
    for content in (whole[:-10], whole[:-1] + b"!", b""):
        (server[0] / "set.tar.gz").write_bytes(content)
        with pytest.raises(PatchbayesError, match=r"set.tar.gz: the md5 is .* expected.*try again"):
            download(source, root)
        assert list(root.iterdir()) == []


def test_a_connection_that_breaks_off(tmp_path, root):
    """The server promises more than it sends."""

    def answer(listening):
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhello")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/x"
        with pytest.raises(PatchbayesError, match=r"md5 is|download failed"):
            download(Source("set", ("x",), (url,), (md5(b"hello!"),)), root)
        thread.join()
    assert everything_below(root) == []


def test_without_a_network_one_sentence_says_what_to_put_where(root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # closed again: nobody answers there
    source = Source("set", ("a.bin", "b.txt"), (f"http://127.0.0.1:{port}/set.tar.gz",), (md5(b""),))
    with pytest.raises(PatchbayesError) as caught:
        found(source, root)
    message = str(caught.value)
    for text in (
        str(root / "set"),
        "a.bin, b.txt",
        f"http://127.0.0.1:{port}/set.tar.gz",
        "--data-dir",
        "PATCHBAYES_DATA",
    ):
        assert text in message
    assert "\n" not in message
    assert not (root / "set").exists()


def test_a_file_that_the_server_does_not_have(server, root):
    source = Source("set", ("x", "y"), (f"{server[1]}/x", f"{server[1]}/y"), (md5(b""), md5(b"")))
    with pytest.raises(PatchbayesError, match=r"404.*put the files of http://127.0.0.1:\d+ there"):
        download(source, root)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_data_folder_that_cannot_be_written(server, root):
    source = served_archive(server, [("set/a.bin", b"A"), ("set/b.txt", b"B")])
    root.mkdir()
    root.chmod(0o555)
    with pytest.raises(PatchbayesError, match="Permission denied"):
        download(source, root)
    root.chmod(0o755)


def test_a_data_folder_that_is_a_file(server, root):
    source = served_archive(server, [("set/a.bin", b"A"), ("set/b.txt", b"B")])
    root.write_text("in the way")
    with pytest.raises(PatchbayesError, match=r"lacks a.bin, b.txt, and the download failed"):
        download(source, root)


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


HOSTILE = {
    "absolute": ("/tmp/a.bin", b"evil"),
    "parent": ("../a.bin", b"evil"),
    "hidden parent": ("set/../../a.bin", b"evil"),
    "symbolic link": special("set/a.bin", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": special("set/a.bin", tarfile.LNKTYPE, "../../secret"),
    "fifo": special("set/a.bin", tarfile.FIFOTYPE),
    "device": special("set/a.bin", tarfile.CHRTYPE),
}


@pytest.mark.parametrize("member", HOSTILE.values(), ids=HOSTILE)
def test_hostile_archives_are_refused_as_a_whole(server, root, member):
    source = served_archive(server, [("set/a.bin", b"A"), ("set/b.txt", b"B"), member])
    before = everything_below(root.parent)
    with pytest.raises(PatchbayesError, match="refused"):
        download(source, root)
    assert everything_below(root.parent) == before


def test_an_archive_without_the_files(server, root):
    with pytest.raises(PatchbayesError, match=r"set.tar.gz: does not contain b.txt"):
        download(served_archive(server, [("set/a.bin", b"A")]), root)
    folder, url = server
    (folder / "set.tar.gz").write_bytes(b"no archive")
    source = Source("set", ("a.bin",), (f"{url}/set.tar.gz",), (md5(b"no archive"),))
    with pytest.raises(PatchbayesError, match=r"not be opened|not a gzip"):
        download(source, root)
    assert everything_below(root) == []


def test_several_downloads_at_once(server, root):
    source = served_archive(server, [("set/a.bin", os.urandom(300_000)), ("set/b.txt", b"B")])
    errors = []

    def run():
        try:
            found(source, root)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert everything_below(root) == ["set/a.bin", "set/b.txt"]


def test_read_downloads_a_set_that_is_missing(server, root, monkeypatch):
    records = np.zeros((6, 3074), dtype=np.uint8)
    records[:, 1] = np.arange(6)
    names = "\n".join(f"c{i}" for i in range(100)).encode()
    members = [
        ("cifar-100-binary/train.bin", records.tobytes()),
        ("cifar-100-binary/test.bin", records.tobytes()),
        ("cifar-100-binary/fine_label_names.txt", names),
    ]
    source = served_archive(server, members, files=CIFAR100.files)
    monkeypatch.setattr(reading, "CIFAR100", Source(CIFAR100.folder, CIFAR100.files, source.urls, source.checksums))
    assert read("cifar100", root, held_out=0).test.targets.tolist() == [0, 1, 2, 3, 4, 5]


def test_every_public_set_has_a_checksum_for_what_it_fetches():
    for source in (CIFAR10, CIFAR100, MNIST, FASHION_MNIST, *UCI.values()):
        assert len(source.checksums) in (1, len(source.urls))
        for checksum in source.checksums:
            algorithm, _, digest = checksum.partition(":")
            assert len(digest) == 2 * hashlib.new(algorithm).digest_size
        assert all(url.startswith("https://") for url in source.urls)


@pytest.mark.parametrize("name", UCI)
def test_checksums_of_the_regression_sets(data_dir, name):
    source = UCI[name]
    assert source.missing(data_dir / source.folder) == []
    digest = hashlib.sha256()
    for file in source.files:
        digest.update((data_dir / source.folder / file).read_bytes())
    assert source.checksums == (f"sha256:{digest.hexdigest()}",)
    assert len([file for file in source.files if "train" in file]) == len(
        list((data_dir / source.folder).glob("index_train_*"))
    )


def test_nothing_is_left_behind_by_an_interrupted_download(server, root, monkeypatch):
    source = served_archive(server, [("set/a.bin", b"A"), ("set/b.txt", b"B")])

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("patchbayes.data.download.shutil.copyfile", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        download(source, root)
    assert everything_below(root) == []

"""A file is replaced as a whole or not at all: under errors, other writers, and SIGKILL."""

import fcntl
import json
import os
import signal
import socket
import stat
import sys
import threading

import pytest
from torch import nn

from kp_dynamo import TPUCheckpointError, save_checkpoint
from kp_dynamo.api.checkpoint.atomic_file import replacing
from tests.spine import run_script

pytestmark = pytest.mark.compat


def write(path, text):
    with replacing(path) as scratch, open(scratch, "w") as file:
        file.write(text)


def test_the_new_file_takes_the_place_of_the_old(tmp_path):
    for text in ("first", "second"):
        write(tmp_path / "a", text)
        assert (tmp_path / "a").read_text() == text
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    write(tmp_path / "a", "old")

    def fail():
        with replacing(tmp_path / "a") as scratch, open(scratch, "w") as file:
            file.write("half")
            raise error

    with pytest.raises(error):
        fail()
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"


def test_permissions_are_those_of_the_old_file_else_of_the_umask(tmp_path):
    write(tmp_path / "a", "")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "a").chmod(0o640)
    write(tmp_path / "a", "")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_the_file_is_durable_before_the_rename_and_the_rename_after(tmp_path, monkeypatch):
    calls, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: calls.append(os.readlink(f"/proc/self/fd/{handle}")) or sync(handle)
    )
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append("rename") or replace(a, b))
    write(tmp_path / "a", "text")
    file, rename, folder = calls
    assert (os.path.basename(file), rename, folder) == ("file", "rename", str(tmp_path))


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    abandoned = tmp_path / ".kp_tpu-abandoned.tmp"
    abandoned.mkdir()
    (abandoned / "file").write_text("half")
    (tmp_path / ".kp_tpu-mine").write_text("not ours")
    with replacing(tmp_path / "slow") as scratch:
        write(tmp_path / "quick", "text")
        assert not abandoned.exists()
        assert os.path.isdir(os.path.dirname(scratch))
        with open(scratch, "w") as file:
            file.write("slow text")
    assert (tmp_path / "slow").read_text() == "slow text"
    assert sorted(os.listdir(tmp_path)) == [".kp_tpu-mine", "quick", "slow"]


def test_without_locks_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    def no_locks(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".kp_tpu-perhaps.tmp").mkdir()
    write(tmp_path / "a", "text")
    assert sorted(os.listdir(tmp_path)) == [".kp_tpu-perhaps.tmp", "a"]


def test_writers_at_once_each_write_a_whole_file(tmp_path):
    texts = [letter * 20000 for letter in "abcd"]
    wrong = []

    def work(text):
        for _ in range(15):
            write(tmp_path / "a", text)
            seen = (tmp_path / "a").read_text()
            if seen not in texts:
                wrong.append(seen)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert os.listdir(tmp_path) == ["a"]


# A child saves without end; its parent kills it, at random moments and at each step of the way, and looks at the file.
KILLING = """
import json, os, random, signal, time
import torch
from kp_dynamo.api.checkpoint import atomic_file, checkpoint
from kp_dynamo.api.checkpoint import file as checkpoint_file
path, found, left = os.path.join(FOLDER, "model.pth"), [], []
torch.set_num_threads(1)  # the threads of others do not come along into a forked child

def make(value):
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    torch.nn.init.constant_(model.weight, value)
    optimizer.state[model.weight] = {"momentum_buffer": torch.full((200, 200), float(value))}
    return model, optimizer

def look(when, allowed):
    left.append(len(os.listdir(FOLDER)) - 1)
    model, optimizer = make(-1)
    step = checkpoint.load_checkpoint(path, model, optimizer).step
    values = {*model.weight.flatten().tolist(), *optimizer.state[model.weight]["momentum_buffer"].flatten().tolist()}
    found.append([when, values == {float(step)} and (allowed is None or step in allowed), step])

def save(step):
    checkpoint.save_checkpoint(path, *make(step), step=step)

def in_child(run):
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(1)
    return child

def forever():
    for step in range(1, 10**6):
        save(step)
        os.write(saved, b".")

def dies_at(module, name, after):
    def run():
        original = getattr(module, name)
        def dying(*args, **kwargs):
            if after:
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(module, name, dying)
        save(2)
    return run

save(0)
random.seed(0)
seen, saved = os.pipe()
for number in range(15):
    child = in_child(forever)
    os.read(seen, 1000)  # it is under way
    time.sleep(random.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    look("random", None)
places = [(os, "replace"), (os, "fsync"), (os, "chmod"), (checkpoint_file, "save_file"),
          (atomic_file.tempfile, "mkdtemp"), (atomic_file.shutil, "rmtree")]
for module, name in places:
    for after in (False, True):
        save(1)
        status = os.waitpid(in_child(dies_at(module, name, after)), 0)[1]
        is_new = (name, after) == ("replace", True) or name == "rmtree"
        look(f"{'after' if after else 'before'} {name}", [2] if is_new else [1])
        found[-1].append(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
save(3)
print(json.dumps({"found": found, "left": left, "at the end": os.listdir(FOLDER)}))
"""


def test_kill_9_at_any_moment_leaves_a_whole_file(tmp_path):
    told = json.loads(run_script(f"FOLDER = {str(tmp_path)!r}\n{KILLING}"))
    wrong = [entry for entry in told["found"] if not all(entry[1:2] + entry[3:])]
    assert wrong == []
    assert len(told["found"]) == 15 + 12
    assert min(step for _, _, step in told["found"][:15]) > 0, "no child lived long enough to save"
    assert max(told["left"]) == 1, "no kill left anything to clean up, or it was not"
    assert told["at the end"] == ["model.pth"]


def test_a_killed_process_frees_its_lock(tmp_path):
    """What the removal of abandoned folders rests on."""
    code = f"""
import os, signal
from kp_dynamo.api.checkpoint.atomic_file import replacing
with replacing({str(tmp_path / "a")!r}):
    print("locked", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    write(tmp_path / "a", "text")
    assert os.listdir(tmp_path) == ["a"]


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # the whole path may be too long for a socket


@pytest.mark.parametrize("make", [make_fifo, make_socket])
def test_what_is_no_regular_file_is_left_as_it_is(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "special")
    before = (tmp_path / "special").stat()
    with pytest.raises(OSError, match="is not a regular file"):
        write(tmp_path / "special", "text")
    with pytest.raises(TPUCheckpointError, match=r"special' could not be written: .*is not a regular file"):
        save_checkpoint(tmp_path / "special", nn.Linear(1, 1))
    after = (tmp_path / "special").stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert os.listdir(tmp_path) == ["special"]


def test_what_became_no_regular_file_meanwhile_is_left_as_it_is(tmp_path):
    def write_slowly():
        with replacing(tmp_path / "special") as scratch, open(scratch, "w") as file:
            file.write("text")
            os.mkfifo(tmp_path / "special")

    with pytest.raises(OSError, match="is not a regular file"):
        write_slowly()
    assert stat.S_ISFIFO((tmp_path / "special").stat().st_mode)
    assert os.listdir(tmp_path) == ["special"]

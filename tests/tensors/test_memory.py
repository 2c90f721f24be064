"""Memory that nobody holds is given out again, and no other."""

import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from decentral.errors import ConfigError, DiskError
from decentral.state.durable import DISK
from decentral.tensors import memory
from decentral.tensors.device import less
from decentral.tensors.memory import fresh, fresh_like, fresh_zeros, give_back, offload_to

LONG = (1 << 20) + 7  # values: long enough to be given out again, and a length that no other test asks for


def test_memory_that_nobody_holds_any_more_is_given_out_again():
    first = fresh(LONG)
    where = first.data_ptr()
    del first
    again = [fresh(LONG) for _ in range(2)]
    assert where in [one.data_ptr() for one in again]
    assert again[0].data_ptr() != again[1].data_ptr()


def test_memory_that_is_given_back_is_no_longer_kept_for_the_next_round():
    first = fresh(LONG)
    del first
    gc.collect()
    assert any(block.nbytes >= 4 * LONG for block in memory._free)
    give_back()
    assert not memory._free


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux alone")
def test_pages_of_libraries_are_given_back_and_read_again(tmp_path):
    with heavy(tmp_path / "other") as pages:
        try:
            pages.madvise(memory._PAGE_OUT)
        except OSError:
            pytest.skip("this kernel is asked for nothing like it")
        if resident(tmp_path / "other") >= 1 << 19:
            pytest.skip("this kernel, or this file system, keeps them")
    with heavy(tmp_path / "libheavy.so") as pages:
        data = pages[:]
        assert resident(tmp_path / "libheavy.so") == 1 << 20
        give_back()
        assert resident(tmp_path / "libheavy.so") < 1 << 19
        assert pages[:] == data


@contextmanager
def heavy(path: Path) -> Iterator[mmap.mmap]:
    """A file of 1 MiB, in memory."""
    data = os.urandom(1 << 20)
    DISK.write(path, [data])  # with an fsync: pages that wait to be written stay
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert pages[:] == data
        yield pages


def resident(path: Path) -> int:
    """Bytes of a file that this process has in memory."""
    _, _, rest = Path("/proc/self/smaps").read_text().partition(str(path))
    return 1024 * int(rest.partition("Rss:")[2].split()[0])


FORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "a slice": lambda tensor: tensor[5:9],
    "an array": lambda tensor: tensor.numpy(),
    "its bytes": lambda tensor: memoryview(tensor.numpy()),
    "other dtype": lambda tensor: tensor.view(torch.uint8),
    "detached": lambda tensor: [tensor.detach()],
    "a tensor of an array": lambda tensor: torch.from_numpy(tensor.numpy()[3:]),
}


def test_what_somebody_holds_in_any_form_is_not_given_out():
    held, where = {}, {}
    for form, hold in FORMS.items():
        first = fresh(LONG)
        where[first.data_ptr()], held[form] = form, hold(first)
        del first
    gc.collect()
    others = [fresh(LONG) for _ in range(8)]
    assert [where[one.data_ptr()] for one in others if one.data_ptr() in where] == []


def test_zeros_are_zeros_in_used_memory_too():
    fresh(LONG).fill_(3.0)
    for _ in range(3):
        zeros = fresh_zeros(LONG)
        assert not zeros.any()
        zeros.fill_(1.0)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)])
def test_a_fresh_tensor_has_the_shape_that_was_asked_for(shape):
    like = torch.empty(shape, dtype=torch.float64).t() if len(shape) == 2 else torch.empty(shape)
    made = fresh_like(like)
    assert (made.shape, made.dtype, made.is_contiguous()) == (like.shape, torch.float32, True)


def test_threads_never_get_the_same_memory():
    clashes = []

    def work(mark: float) -> None:
        for _ in range(60):
            mine = fresh(LONG)
            mine.fill_(mark)
            if not bool((mine[:: LONG // 7] == mark).all()):
                clashes.append(mark)

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []


@pytest.fixture
def offloaded(tmp_path):
    offload_to(tmp_path)
    yield tmp_path
    offload_to(None)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="where mapped files can be seen")
def test_long_vectors_lie_in_files_that_nobody_sees_where_they_are_offloaded(offloaded):
    first, zeros = fresh(LONG).fill_(2.0), fresh_zeros(LONG)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(offloaded)) >= 2
    assert list(offloaded.iterdir()) == []
    assert float(first.sum()) == 2.0 * LONG
    assert not zeros.any()
    assert str(offloaded) not in "".join(line for line in maps.splitlines() if "(deleted)" not in line)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="where mapped files can be seen")
def test_by_how_much_a_model_rounds_what_is_written_to_it_lies_in_files_too(offloaded):
    """Of a model in bfloat16 that is one vector more, as long as the model."""
    written_N, wanted_N = torch.full((1 << 20,), 1.0), torch.full((1 << 20,), 0.5)
    before = Path("/proc/self/maps").read_text().count(str(offloaded))
    rounding_N = less(written_N, wanted_N)
    assert torch.equal(rounding_N, written_N - wanted_N)
    assert Path("/proc/self/maps").read_text().count(str(offloaded)) == before + 1


def test_a_disk_that_is_full_is_an_error_and_no_signal(offloaded, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(DiskError, match=r"No space left on device for \d+ bytes; free some"):
        fresh(LONG)
    assert fresh(5).numel() == 5


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_begins(tmp_path):
    with pytest.raises(ConfigError, match="name a folder on a disk"):
        offload_to(tmp_path / "none")

"""The table of GPUs and the description of the machine at hand."""

import getpass
import json
import os
import platform
import runpy
from pathlib import Path

import pytest
import torch

from gptlite import hardware
from gptlite.hardware import device_name, find_gpu, free_bytes, gpu, gpus, is_out_of_memory, machine, memory_bytes


def test_the_table_is_large_and_plausible():
    assert len(gpus()) >= 15
    for row in gpus().values():
        assert 1e13 < row.peak_flops <= row.fp16_accumulate_flops < 1e16
        assert 1e11 < row.bandwidth < 1e13
        assert 1e10 < row.memory_bytes < 1e12
        assert 50 < row.ridge_point < 1000
        assert row.source
        assert row.matches


def test_an_unknown_gpu_is_named():
    with pytest.raises(ValueError, match="no GPU 'H900', there are V100 SXM2"):
        gpu("H900")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 2080", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("AMD Instinct MI300X", "MI300X"),
        ("", None),
    ],
)
def test_a_card_is_found_by_the_drivers_name(driver, name):
    assert getattr(find_gpu(driver), "name", None) == name


def test_the_machine_is_described_without_telling_whose_it_is():
    about = machine()
    assert about["kind"] == "cpu"
    assert about["name"] == device_name() != ""
    assert about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    text = json.dumps(about)
    for secret in (platform.node(), getpass.getuser(), os.getcwd(), os.path.expanduser("~")):
        assert secret not in text


def test_memory_is_that_of_the_system():
    assert 0 < free_bytes() < memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_processor_that_does_not_say_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert device_name() == platform.machine()


def test_running_out_of_memory_is_recognised():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


def test_the_books_page_is_made_from_the_facts():
    root = Path(__file__).parents[2]
    tool = runpy.run_path(str(root / "tools" / "hardware.py"))
    assert (root / "book" / "hardware.md").read_text() == tool["page"]()  # else run python tools/hardware.py
    assert tool["page"]().count("| RTX 2080 Ti | 53.8 | 616 | 11 | 87 |") == 1

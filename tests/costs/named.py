"""Accelerators and models of the catalogue, as tests name them."""

from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator

H100 = accelerator("h100")
H200 = accelerator("h200")
L40S = accelerator("l40s")
A100 = accelerator("a100")
GB200 = accelerator("gb200-nvl72")
LLAMA_70B = geometry("llama-3-70b")
LLAMA_31_70B = geometry("llama-3.1-70b")
LLAMA_8B = geometry("llama-3-8b")
LLAMA_31_8B = geometry("llama-3.1-8b")
QWEN_235B = geometry("qwen3-235b-a22b")
DEEPSEEK = geometry("deepseek-v3")
OPT_13B = geometry("opt-13b")

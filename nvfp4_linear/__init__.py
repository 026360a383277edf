from pathlib import Path

import torch

torch.ops.load_library(str(Path(__file__).with_name("_C.so")))

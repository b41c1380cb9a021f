"""Training: fit, evaluate and predict, with metrics, callbacks and checkpoints."""

from . import safetensors
from .callback import Callback, Run
from .callbacks import Checkpoint, EarlyStopping, PlateauSchedule, Validation
from .checkpoint import Saved, load
from .evaluation import Evaluator, evaluate, predict
from .history import History
from .loop import fit
from .metrics import (
    F1,
    Accuracy,
    BinaryAccuracy,
    ConfusionMatrix,
    Metric,
    Precision,
    Recall,
    TopK,
    accuracy,
)
from .models import load_model, save
from .pretrained import load_efficientnet_lite, load_gpt2
from .report import JsonLog, Progress, TensorBoard
from .torch_files import read_torch_file

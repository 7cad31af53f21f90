"""Loggers that belong to somebody else: TensorBoard files, W&B, SwanLab, MLflow. Each imports its package when made."""

import json
import math
import os
from pathlib import Path
from typing import Any

from r1.config import TrainerConfig


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


class TensorBoard:
    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier process wrote about the steps that are done again.
        purge = None if resumed_step is None else resumed_step + (resumed_step > 0)
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in _finite(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        for i, record in enumerate(records):
            self.writer.add_text(f"samples/{kind}/{i}", json.dumps(record, ensure_ascii=False, indent=1), step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(
        self, config: TrainerConfig, settings: dict[str, Any], run_dir: Path, resumed_step: int | None
    ) -> None:
        import wandb

        self.wandb = wandb
        # A resumed run goes on in the same page.
        remembered = run_dir / "wandb_id.txt"
        if not resumed_step or not remembered.exists():
            remembered.write_text(os.urandom(4).hex())
        self.run = wandb.init(
            project=config.project_name,
            name=config.experiment_name,
            id=remembered.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=settings,
        )
        # Our own axis: wandb drops rows whose own step is below the last one, as after a resume.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step} | _finite(metrics))

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        if records:
            columns: list[Any] = list(records[0])
            rows: list[Any] = [[str(record.get(column)) for column in columns] for record in records]
            self.run.log({"step": step, f"samples/{kind}": self.wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        self.run.finish()


class SwanLab:
    def __init__(self, config: TrainerConfig, settings: dict[str, Any], run_dir: Path) -> None:
        import swanlab

        self.swanlab = swanlab
        swanlab.init(
            project=config.project_name,
            experiment_name=config.experiment_name,
            config=settings,
            logdir=str(run_dir / "swanlab"),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.swanlab.log(_finite(metrics), step=step)

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        texts = [self.swanlab.Text(json.dumps(record, ensure_ascii=False, indent=1)) for record in records]
        if texts:
            self.swanlab.log({f"samples/{kind}": texts}, step=step)

    def close(self) -> None:
        self.swanlab.finish()


class MLflow:
    def __init__(self, config: TrainerConfig, settings: dict[str, Any], run_dir: Path) -> None:
        import mlflow

        self.mlflow = mlflow
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # 3.17 wants a database, which mlflow-skinny cannot open
            mlflow.set_tracking_uri((run_dir / "mlflow").absolute().as_uri())
        mlflow.set_experiment(config.project_name)
        mlflow.start_run(run_name=config.experiment_name)
        mlflow.log_params({f"{s}.{k}": str(v)[:500] for s, fields in settings.items() for k, v in fields.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # It refuses the @ of pass@8.
        self.mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in _finite(metrics).items()}, step=step)

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """MLflow has no table that grows by steps; samples.jsonl has them."""

    def close(self) -> None:
        self.mlflow.end_run()

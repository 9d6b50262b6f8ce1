"""The record sent on: MLflow, Weights & Biases, TensorBoard.

following.py      a tracker that follows the record in a thread; and the id that a receiver knows a run by
muted.py          silences loggers in one thread
mlflow.py         the run in MLflow; mlflow_run.py: as the server has it, mlflow_extras.py: besides its metrics,
                  mlflow_model.py: its export in the registry
tensorboard.py    the run in TensorBoard; wandb.py: in Weights & Biases
"""

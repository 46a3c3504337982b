"""torchtitan: a ``build_optimizers`` for its training specification.

Not run: torchtitan needs GPUs, and its entry differs between releases; compare with yours. The
trainer calls this function with the parts of the model on this rank, after ``fully_shard``, one
part for each pipeline stage. K-FAC does not cover layers that tensor parallelism cuts: use data
parallelism (``fully_shard``) and pipeline stages. Compile the blocks before they are sharded, as
torchtitan does.
"""

from torchtitan.components.optimizer import OptimizersContainer

from kaisa_optim import KFACAdam


def build_optimizers(model_parts, optimizer_config, *unused, **also_unused):
    """Return torchtitan's container with one K-FAC optimizer for each part of the model."""
    container = OptimizersContainer.__new__(OptimizersContainer)
    container.model_parts = model_parts
    container.optimizers = [KFACAdam(part, lr=optimizer_config.lr) for part in model_parts]
    parameters = [p for part in model_parts for p in part.parameters() if p.requires_grad]
    container._post_init(parameters, {"lr": optimizer_config.lr})
    return container


# In the training specification of your model:
#     TrainSpec(..., build_optimizers_fn=build_optimizers, ...)

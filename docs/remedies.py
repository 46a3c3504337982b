"""What to do about messages that do not end with it, by a part of their text."""

REMEDIES = {
    # plans
    "are not known before a step": (
        "Give grad_worker_fraction as a number. No plan can be made for this base."
    ),
    "is no TOML file": "Write the profile as those in kaisa_optim/tools/profiles.",
    "the model can't be run with it on the meta device": (
        "Give the arguments of the model's forward, or leave batch out."
    ),
    # warnings
    "the base optimizer updates these": (
        "K-FAC knows no layer kind for these parameters. Read print(optimizer.preconditioner) "
        "for the reasons; register a layer kind, or accept it."
    ),
    "All ranks raise this error": (
        "After an error of the base's step, the ranks' weights have drifted apart. Correct the "
        "named error, and go back to a checkpoint."
    ),
    "statistics that were not finite": (
        "A loss or an activation overflowed. One such warning after a loss spike does no harm. If "
        "the warning returns, lower the learning rate, or use bfloat16 in place of float16."
    ),
    "stays in use. See whether the loss": (
        "See whether the loss is finite, and raise damping. Training goes on, unless max_failures "
        "limits the failures in a row."
    ),
    "has no K-FAC factors": (
        "The file is of a plain optimizer, of other options, or of one rank's share. K-FAC "
        "estimates the factors again, so nothing has to be done. To continue bit for bit, call "
        "consolidate_state_dict() on all ranks before a save."
    ),
    "'s share of the state": (
        "Call consolidate_state_dict(to=rank) on all ranks before state_dict(), or save with "
        "torch.distributed.checkpoint."
    ),
    # errors
    "unexpected keyword argument …; …": "The message names what takes its place.",
    "does not divide …": "Use one of the fractions that the message names.",
    "has its weight and bias in parameter groups": (
        "Give both groups the same damping and factor_decay. Rates and weight decay may differ."
    ),
    "has no attribute": "Take a name of the API.",
    "on ranks … differs from rank 0's": (
        "The ranks have other weights or gradients. Do what the message ends with."
    ),
    "K-FAC stops on all ranks": (
        "One rank had an error, which the message names. Correct that error; the other ranks only "
        "follow."
    ),
    "they differ among the ranks": "Build the same model with the same options on all ranks.",
    "are not the model's any more": (
        "Something replaced parameters after the optimizer was built. Build it after that."
    ),
    "has no statistics yet": "Ask after the first step.",
    "needs the whole state": "Do both, as the message says.",
    "that fully_shard shards": (
        "Save with torch.distributed.checkpoint, or load the weights alone into an unsharded model."
    ),
    "only some ranks have loaded": "Call load_state_dict() on all ranks.",
    "needs module classes": "Write @register_layer(ModuleClass).",
    "takes a subclass of Layer": "Derive the class from kaisa_optim.Layer.",
    "which must return rows": "Write the method that is named.",
    "K-FAC lost other ranks": (
        "Read the log of the rank that failed first. If a rank only takes long, lengthen the "
        "process group's time-out."
    ),
    "needs the model first": "Pass the model as the first argument.",
    "can't take K-FAC": "Take a dense base, such as SGD, Adam, AdamW or RAdam.",
    "please consider SparseAdam": "Build the embedding without sparse=True.",
    "does not support complex": "Give complex parameters to another optimizer.",
    "cannot be captured in a CUDA graph": "Run the training step outside of CUDA graphs.",
    'backend="apex" needs': "Build apex from its source repository, or use the torch backend.",
    "Tensor lr must be": "Pass a number, or a tensor with one element.",
    "Invalid learning rate": "Pass a number, 0 or above.",
    "Invalid epsilon value": "Pass a number, 0 or above.",
    "Invalid beta parameter": "Pass numbers in [0, 1).",
    "Invalid weight_decay value": "Pass a number, 0 or above.",
    "place put": "Return ranks of the grid, as the message says.",
}

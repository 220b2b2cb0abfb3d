"""Training of the whole model: from examples to checkpoints, metrics and figures.

    settings.py      how a run goes: preset, steps, epochs, checkpoints; overrides by dotted names
    loss_terms.py    the loss by the field's terms; a term that is not finite counts as zero
    train_step.py    one optimiser step: gradients of samples, clipped and averaged, Adam, EMA
    checkpoints.py   Orbax checkpoints that resume exactly
    validation.py    whole chains, averaged weights, lDDT, dRMSD and GDT
    logbook.py       the record of a run: JSON lines, TensorBoard, curves
    display.py       what a terminal shows meanwhile
    run.py           the loop over all of these

Nothing here knows of memory management: a step becomes managed from outside (`run.train`'s
`wrap_step`).
"""

"""What `import trainer` offers."""

from importlib.metadata import version

import trainer


def test_the_public_names_are_listed_and_lead_somewhere():
    assert {"PackLoader", "PackedCollator", "PackedLM", "TrainConfig", "check_model", "evaluate", "load_model"} <= set(
        dir(trainer)
    )
    assert set(trainer.__all__) == set(dir(trainer))
    for name in dir(trainer):
        assert getattr(trainer, name) is not None


def test_the_version_is_the_distributions():
    assert trainer.__version__ == version("shardpack")


def test_a_public_name_stays_what_it_is_after_its_module_was_imported():
    import trainer
    import trainer.evaluation

    assert trainer.evaluate is trainer.evaluation.evaluate

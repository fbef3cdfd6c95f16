"""What happens beside the jobs of a run: finished files go to `upload.target`."""

from subprocess import CalledProcessError

# Never in a job's way: it ends by itself when the process that started it has ended.
BESIDE_THE_RUN = "--watch $PPID >> results/state/upload.log 2>&1 &"


def uploads(how):
    """Run upload_results where there is something to upload to. Its failure at the end of a run is the run's."""
    try:
        if PLAN.config.upload.target:
            shell(f"python -m scripts.upload_results --config results/state/config.json --results results {how}")
    except CalledProcessError:
        sys.exit(1)  # the command has said why

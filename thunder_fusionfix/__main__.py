"""``python -m thunder_fusionfix``: the command `fusionfix`."""

from thunder_fusionfix.cli import run

if __name__ == "__main__":
    run()

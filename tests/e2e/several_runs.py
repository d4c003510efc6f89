"""Train several times in one process, with the command lines that the only argument has as JSON."""

import json
import sys

import train_rl

if __name__ == "__main__":
    for command_line in json.loads(sys.argv[1]):
        sys.argv[1:] = command_line
        if code := train_rl.main():
            sys.exit(code)

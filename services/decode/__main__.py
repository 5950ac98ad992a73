from kvmesh.runtime.app import run_service
from services.decode.config import DecodeConfig
from services.decode.service import build

if __name__ == "__main__":
    run_service("decode", DecodeConfig, build)

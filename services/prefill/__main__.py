from kvmesh.runtime.app import run_service
from services.prefill.config import PrefillConfig
from services.prefill.service import build

if __name__ == "__main__":
    run_service("prefill", PrefillConfig, build)

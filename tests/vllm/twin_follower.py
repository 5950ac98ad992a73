"""The process of a rank, as `kvmesh.engine.vllm_follower`; devices are imitated in host memory."""

from kvmesh.engine.vllm_follower import main
from tests.device_twin import twin_driver

if __name__ == "__main__":
    main(twin_driver)

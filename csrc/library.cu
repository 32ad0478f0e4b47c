// What the loader reads before it uses the library.
#include "device.cuh"

extern "C" int fb_abi_version() { return 6; }

extern "C" int fb_is_emulation() {
#ifdef FB_HOST_EMULATION
  return 1;
#else
  return 0;
#endif
}

extern "C" const char* fb_error_string(int code) {
#ifdef FB_HOST_EMULATION
  return code == 0 ? "no error" : "launch failure";
#else
  return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

#ifdef FB_HOST_EMULATION
// Sets the number of multiprocessors of the emulated device; returns the one before.
extern "C" int fb_emulate_multiprocessors(int count) { return std::exchange(emulation::multiprocessors, count); }

extern "C" void fb_emulate_replay(void (*before)()) { emulation::before_replay = before; }
#endif

// The CUDA version of the driver, 12040 for 12.4; 0 without a driver.
extern "C" int fb_driver_version() {
  int version = 0;
#ifndef FB_HOST_EMULATION
  cudaDriverGetVersion(&version);
#endif
  return version;
}

extern "C" int fb_runtime_version() {
#ifdef FB_HOST_EMULATION
  return 0;
#else
  return CUDART_VERSION;
#endif
}

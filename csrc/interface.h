// How a library is called: each function takes one struct, and says what is in it, so that its loader
// (fb_kernels/shared_library.py) passes arguments by name.
#pragma once

#include <cstdint>

#define FB_TEXT(...) #__VA_ARGS__

// Begins the definition of a function that is given these fields: pointers, int, int64_t and double.
#define FB_FUNCTION(name, ...)                          \
  struct name##_fields {                                \
    __VA_ARGS__                                         \
  };                                                    \
  extern "C" const char* name##_takes(int64_t* bytes) { \
    *bytes = sizeof(name##_fields);                     \
    return FB_TEXT(__VA_ARGS__);                        \
  }                                                     \
  extern "C" int64_t name(const name##_fields& given)

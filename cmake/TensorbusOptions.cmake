# Build-wide settings: language level, warnings, sanitizers, optional parts.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

option(TENSORBUS_BUILD_TESTS "Build the C++ tests" ON)
option(TENSORBUS_BUILD_BENCH "Build the benchmarks" OFF)
option(TENSORBUS_BUILD_PYTHON "Build the Python module" OFF)
option(TENSORBUS_BUILD_FUZZERS "Build libFuzzer targets (clang only)" OFF)
option(TENSORBUS_WERROR "Treat warnings as errors (CI)" OFF)
set(TENSORBUS_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize= (address,undefined or thread)")

find_program(TENSORBUS_CCACHE ccache)
if(TENSORBUS_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${TENSORBUS_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TENSORBUS_CCACHE})
endif()

# Carries the warning level; linked privately by every target of ours, so that third-party headers stay quiet.
add_library(tensorbus_warnings INTERFACE)
target_compile_options(tensorbus_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
  $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual>
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
  $<$<BOOL:${TENSORBUS_WERROR}>:-Werror>)

# Only what a program truly uses: a worker that loads the shim must not get the log and metrics libraries of base.
add_link_options(-Wl,--as-needed)

# GCC takes a file that another includes for a header, where a type of an anonymous namespace would be a mistake.
if(CMAKE_UNITY_BUILD)
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()

if(TENSORBUS_SANITIZE)
  # The first finding ends the program: a test that goes on after one would pass.
  add_compile_options(-fsanitize=${TENSORBUS_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TENSORBUS_SANITIZE})
  # Its check asks a pipe whether memory can be read: without free descriptors every object looks wrong.
  add_compile_options(-fno-sanitize=vptr)
  # GCC warns falsely of uninitialised values once sanitizers have rewritten the code; the plain builds do warn.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()

# Short forms for the targets of a folder. Folder names become target names: tensorbus::planner.

include(GNUInstallDirs)

# In a folder that moves or compares bytes one by one. The presets asan and tsan do not optimise otherwise, which halves the
# time that building takes; these loops would lose more than that in their tests. The fuzz targets are optimised more as it is.
macro(tensorbus_optimize_when_sanitized)
  if(TENSORBUS_SANITIZE AND CMAKE_CXX_FLAGS_RELWITHDEBINFO MATCHES "-O0")
    add_compile_options(-O1)
  endif()
endmacro()

# tensorbus_library(NAME planner SRCS a.cc DEPS tensorbus::types [PRIVATE_DEPS ...])
function(tensorbus_library)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(tensorbus_${ARG_NAME} STATIC ${ARG_SRCS})
    target_include_directories(tensorbus_${ARG_NAME} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(tensorbus_${ARG_NAME} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS} tensorbus_warnings)
  else()
    add_library(tensorbus_${ARG_NAME} INTERFACE)
    target_include_directories(tensorbus_${ARG_NAME} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(tensorbus_${ARG_NAME} INTERFACE ${ARG_DEPS})
  endif()
  add_library(tensorbus::${ARG_NAME} ALIAS tensorbus_${ARG_NAME})
endfunction()

# tensorbus_binary(NAME tensorbusd SRCS main.cc DEPS tensorbus::daemon): an installed program.
function(tensorbus_binary)
  cmake_parse_arguments(ARG "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${ARG_NAME} ${ARG_SRCS})
  target_link_libraries(${ARG_NAME} PRIVATE ${ARG_DEPS} tensorbus_warnings)
  set_target_properties(${ARG_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  # `cmake --build … --target programs` builds what users run, without the tests.
  if(NOT TARGET programs)
    add_custom_target(programs)
  endif()
  add_dependencies(programs ${ARG_NAME})
  install(TARGETS ${ARG_NAME} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT programs)
endfunction()

# tensorbus_test(split_test SRCS split_test.cc DEPS tensorbus::planner LABELS unit [TIMEOUT 60] [ARGS ...])
function(tensorbus_test NAME)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS;ARGS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${NAME} ${ARG_SRCS})
  target_link_libraries(${NAME} PRIVATE ${ARG_DEPS} tensorbus::testing GTest::gmock_main tensorbus_warnings)
  add_test(NAME ${NAME} COMMAND ${NAME} ${ARG_ARGS})
  set(env "")
  if(TENSORBUS_SANITIZE MATCHES "thread")
    list(APPEND env
      "TSAN_OPTIONS=ignore_noninstrumented_modules=1:suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp")
  endif()
  if(TENSORBUS_SANITIZE)  # programs are several times slower there
    math(EXPR ARG_TIMEOUT "3 * ${ARG_TIMEOUT}")
  endif()
  set_tests_properties(${NAME} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT "${env}")
endfunction()

function(tensorbus_print_summary)
  message(STATUS "tensorbus ${PROJECT_VERSION}: ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  message(STATUS "  tests ${TENSORBUS_BUILD_TESTS}  bench ${TENSORBUS_BUILD_BENCH}  python ${TENSORBUS_BUILD_PYTHON}  fuzzers ${TENSORBUS_BUILD_FUZZERS}  sanitize '${TENSORBUS_SANITIZE}'")
endfunction()

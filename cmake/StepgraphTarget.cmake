# What every target of this project is compiled with. All of it is private: nothing reaches an engine that links the library.
function(stepgraph_target target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  # By flag: CMake 3.25 does not know the feature cuda_std_20.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
  set_target_properties(${target} PROPERTIES
      CXX_EXTENSIONS OFF
      CUDA_EXTENSIONS OFF
      CXX_VISIBILITY_PRESET hidden
      CUDA_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      POSITION_INDEPENDENT_CODE ON
      CUDA_ARCHITECTURES "${STEPGRAPH_CUDA_ARCHITECTURES}")
  # Without contraction the host stages round like the device ones, operation by operation.
  target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -ffp-contract=off>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
  if(STEPGRAPH_WERROR)
    target_compile_options(${target} PRIVATE
        $<$<COMPILE_LANGUAGE:CXX>:-Werror>
        $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror --Werror=all-warnings>)
  endif()
endfunction()

# Lets a shared library show its interface and nothing else.
function(stepgraph_limit_exports target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    set(exports ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/stepgraph.exports)
    target_link_options(${target} PRIVATE LINKER:--version-script=${exports})
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${exports})
  endif()
endfunction()

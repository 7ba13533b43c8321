# Every public header compiles on its own: one source per header that includes nothing else, twice, so that a missing
# #pragma once shows too.
file(GLOB stepgraph_public_headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_LIST_DIR}/..
    ${CMAKE_CURRENT_LIST_DIR}/../layouts/*.h
    ${CMAKE_CURRENT_LIST_DIR}/../kernels/error.h
    ${CMAKE_CURRENT_LIST_DIR}/../kernels/export.h
    ${CMAKE_CURRENT_LIST_DIR}/../pipeline/*.h)
set(header_sources)
foreach(header IN LISTS stepgraph_public_headers)
  string(MAKE_C_IDENTIFIER ${header} name)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include <stepgraph/${header}>\n#include <stepgraph/${header}>\n")
  list(APPEND header_sources ${source})
endforeach()
add_library(stepgraph_header_check OBJECT ${header_sources})
stepgraph_target(stepgraph_header_check)
target_link_libraries(stepgraph_header_check PRIVATE stepgraph)

#include "tensorbus/base/mapping.h"

#include <cstring>

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using testing::IsStatus;

TEST(Mapping, TwoMappingsOfOneMemfdShareTheirBytes) {
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, CreateMemfd("test", 8192));
  ASSERT_OK_AND_ASSIGN(Mapping writer,
                       Mapping::Create(fd.get(), 8192, Mapping::Access::kReadWrite));
  ASSERT_OK_AND_ASSIGN(Mapping reader, Mapping::Create(fd.get(), 8192, Mapping::Access::kRead));
  fd.reset();
  ASSERT_OK(TouchPages(writer.span()));
  std::memcpy(writer.data() + 5000, "bus", 4);
  EXPECT_STREQ(reinterpret_cast<const char*>(reader.data() + 5000), "bus");
}

TEST(Mapping, RefusesMoreThanTheObjectHas) {
  ASSERT_OK_AND_ASSIGN(const UniqueFd fd, CreateMemfd("test", 4096));
  EXPECT_THAT(Mapping::Create(fd.get(), 4097, Mapping::Access::kRead),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(Mapping::Create(fd.get(), 0, Mapping::Access::kRead),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(Mapping, TouchingKeepsTheContents) {
  ASSERT_OK_AND_ASSIGN(const UniqueFd fd, CreateMemfd("test", 4096));
  ASSERT_OK_AND_ASSIGN(Mapping mapping,
                       Mapping::Create(fd.get(), 4096, Mapping::Access::kReadWrite));
  std::memset(mapping.data(), 0x5a, 4096);
  ASSERT_OK(TouchPages(mapping.span().subspan(100, 200)));
  EXPECT_EQ(mapping.data()[0], std::byte{0x5a});
  EXPECT_EQ(mapping.data()[4095], std::byte{0x5a});
}

TEST(Mapping, MemfdCannotShrinkUnderAMapping) {
  ASSERT_OK_AND_ASSIGN(const UniqueFd fd, CreateMemfd("test", 8192));
  EXPECT_NE(::ftruncate(fd.get(), 4096), 0);
}

TEST(Mapping, RefusesAnAbsurdSize) {
  EXPECT_FALSE(CreateMemfd("test", ~std::uint64_t{0}).ok());
}

}  // namespace
}  // namespace tensorbus

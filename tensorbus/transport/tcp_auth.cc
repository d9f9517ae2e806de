#include "tensorbus/transport/tcp_auth.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "tensorbus/base/byte_io.h"

namespace tensorbus::transport::tcp {

namespace {

Mac MakeMac(std::string_view token, std::string_view side, const Nonce& target,
            const Nonce& source) {
  ByteWriter message;
  message.PutString(side);
  message.Put(kTcpProtocolVersion);
  message.PutBytes(target);
  message.PutBytes(source);
  Mac mac = {};
  unsigned size = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()),
           reinterpret_cast<const unsigned char*>(message.bytes().data()), message.size(),
           reinterpret_cast<unsigned char*>(mac.data()), &size);
  TB_CHECK(made != nullptr && size == mac.size());
  return mac;
}

}  // namespace

Result<Nonce> MakeNonce() {
  Nonce nonce = {};
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) !=
      1) {
    return Status(Code::kUnavailable, "no random bytes for the handshake");
  }
  return nonce;
}

Mac SourceMac(std::string_view token, const Nonce& target, const Nonce& source) {
  return MakeMac(token, "tensorbus tcp source", target, source);
}

Mac TargetMac(std::string_view token, const Nonce& target, const Nonce& source) {
  return MakeMac(token, "tensorbus tcp target", target, source);
}

bool SameMac(const Mac& a, const Mac& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace tensorbus::transport::tcp
